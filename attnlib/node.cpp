// Calls of `attnlib.attention` and `attention_decode` without Python: the forward pass, and the backward pass of
// the first as a node of PyTorch's autograd, so that its engine finds C++ where a `torch.autograd.Function` would bring it to Python.
//
// Decisions stay in Python. The first call of a kind goes through `attnlib.api` and `attnlib.dispatch`, which
// check it, choose a kernel and leave the bytes that `direct.c` launches, and the layouts of the results; so
// does the first backward pass. Those after it only allocate and launch. What counts as the same kind is in
// `Kind`: all that the checks, the choice and the launches depend on. Where anything but autograd, autocast and
// inference mode is active (`ordinary`), or a tensor is no plain one (`Kind::add`), the call goes to Python.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <ATen/Context.h>
#include <ATen/DeviceGuard.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/SafePyObject.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

using torch::autograd::variable_list;

// Tensors that a backward pass reads; `kernels/common/backward_plan.py` names those of its launches.
enum { D_OUT, Q, K, V, OUT, LSE, CU_Q, CU_K, READ };
// Tensors that a call is given: q, k and v; a decoding call also lengths, starts, page_table, k_scale, v_scale.
constexpr Py_ssize_t DENSE = 3, DECODING = 8;
constexpr size_t KINDS = 1024;  // that stay prepared, as `signature.PREPARED`

struct Owned {  // a reference of Python's, used and dropped with the GIL held
  PyObject *object;
  explicit Owned(PyObject *object) : object(object) {
    if (!object) throw python_error();
  }
  Owned(const Owned &) = delete;
  ~Owned() { Py_DECREF(object); }
};

// An `autograd.Asked`, which may be dropped without the GIL. Equal ones are one object.
using Asked = std::shared_ptr<const c10::SafePyObject>;

Asked owned(PyObject *asked) {
  Py_INCREF(asked);
  return std::make_shared<c10::SafePyObject>(asked, getPyInterpreter());
}

// What calls have in common that are launched alike, but for addresses.
class Kind {
  static constexpr size_t WORDS = 96, RANK = 4;
  std::array<int64_t, WORDS> words;
  size_t count = 0;

 public:
  void add(int64_t word) { words[count++] = word; }

  // False for a tensor that is no plain one, or lies at an address that TMA does not take. aligned: whether it
  // has to.
  bool add(const at::Tensor &tensor, bool aligned = true) {
    if (!tensor.defined()) {
      add(-1);
      return true;
    }
    // Not on device "meta", not sparse, none that stands for others or has a sign that is not in memory.
    const auto keys = tensor.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
                      c10::autocast_dispatch_keyset;
    const auto device = tensor.device();
    const auto plain = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
    if (keys != c10::DispatchKeySet(plain) || tensor.dim() > RANK) return false;
    if (aligned && reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl()->data()) % 16) return false;
    add(static_cast<int64_t>(tensor.scalar_type()) << 32 | device.is_cuda() << 24 |
        (device.index() & 0xff) << 16 | tensor.dim());
    for (int64_t size : tensor.sizes()) add(size);
    for (int64_t stride : tensor.strides()) add(stride);
    return true;
  }

  bool operator==(const Kind &other) const {
    return count == other.count && std::equal(words.begin(), words.begin() + count, other.words.begin());
  }

  struct Hash {
    size_t operator()(const Kind &kind) const {
      uint64_t hash = kind.count;
      for (size_t i = 0; i < kind.count; ++i) {
        hash = (hash ^ static_cast<uint64_t>(kind.words[i])) * 0x9E3779B97F4A7C15;
        hash ^= hash >> 32;
      }
      return hash;
    }
  };
};

// How calls of a kind are launched without Python.
struct Forward {
  std::string launches;
  std::vector<int64_t> sizes, strides;  // of the output
  bool lse;                      // whether there is one
  bool counted;                  // whether programs draw their tiles from a counter
  int64_t scratch;               // elements of a float32 buffer for partial results; 0 for none
  Asked asked;                   // for the backward pass; None of a decoding call
};

struct Backward {
  std::string launches;
  int64_t elements;  // of the float32 buffer that the launches share
  std::array<std::vector<int64_t>, 3> strides;  // of dq, dk and dv
  Asked asked;  // lives as long as its address is part of a kind
};

// All of these are guarded by the GIL.
template <typename Pass>
using Prepared = std::unordered_map<Kind, std::shared_ptr<const Pass>, Kind::Hash>;
Prepared<Forward> forwards;
Prepared<Backward> backwards;
std::map<std::pair<int, uint64_t>, at::Tensor> counters;  // of a device and a stream
PyObject *slowly, *counter, *capturing;                   // functions: see `connect`
PyObject *runtime, *enter_hook, *exit_hook, *calls;       // `triton.knobs.runtime`; names of attributes
int (*launch_all)(const char *, size_t, long, uint64_t, const uint64_t *, uint32_t);

template <typename Pass>
void prepare(Prepared<Pass> &prepared, const Kind &kind, Pass &&pass) {
  if (prepared.size() >= KINDS) prepared.clear();
  prepared[kind] = std::make_shared<Pass>(std::move(pass));
}

template <typename Pass>
std::shared_ptr<const Pass> find(const Prepared<Pass> &prepared, const Kind &kind) {
  auto found = prepared.find(kind);
  return found == prepared.end() ? nullptr : found->second;
}

// Whether a profiler has asked Triton to hear of launches, as `launcher.observed`.
bool observed(PyObject *name) {
  Owned hook(PyObject_GetAttr(runtime, name));
  PyObject *chain = PyObject_GetAttr(hook.object, calls);
  if (!chain) PyErr_Clear();  // a function of its own
  const int any = PyObject_IsTrue(chain ? chain : hook.object);
  Py_XDECREF(chain);
  if (any < 0) throw python_error();
  return any;
}

// What may be off in a call that is as any other: autocast, and in backward passes names of dimensions, which
// no plain tensor has. Newer versions of torch have no names.
template <class Key> c10::DispatchKeySet may_be_off() {
  if constexpr (requires { Key::Named; }) return c10::autocast_dispatch_keyset.add(Key::Named);
  return c10::autocast_dispatch_keyset;
}

// Whether no mode, compiler, transformation or profiler is active.
bool ordinary() {
  auto included = c10::default_included_set, excluded = c10::default_excluded_set;
  if (c10::InferenceMode::is_enabled()) {
    included = included.remove(c10::DispatchKey::ADInplaceOrView);
    excluded = excluded | c10::autograd_dispatch_keyset;
  }
  const auto any = may_be_off<c10::DispatchKey>();
  const auto now = c10::impl::tls_local_dispatch_key_set();
  return now.included_ == included && ((now.excluded_ ^ excluded) - any).empty() &&
         !at::impl::PythonTorchFunctionTLS::stack_len() && !at::globalContext().deterministicAlgorithms() &&
         !torch::autograd::ForwardADLevel::try_get_by_idx(0) &&  // no level of forward-mode differentiation
         !observed(enter_hook) && !observed(exit_hook);
}

uint64_t stream_of(c10::Device device) {
  if (!device.is_cuda()) return 0;
  const auto *guard = c10::impl::getDeviceGuardImpl(device.type());
  return reinterpret_cast<uint64_t>(guard->getStreamNativeHandle(guard->getStream(device)));
}

uint64_t address(const at::Tensor &tensor) {
  return tensor.defined() ? reinterpret_cast<uint64_t>(tensor.data_ptr()) : 0;
}

template <size_t N>
void launch(const std::string &launches, c10::Device device, uint64_t stream, const uint64_t (&addresses)[N]) {
  if (launch_all(launches.data(), launches.size(), device.index(), stream, addresses, N)) throw python_error();
}

// ---------------------------------------------------------------- backward

variable_list run(const Backward &pass, const std::array<at::Tensor, READ> &tensors) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto &q = tensors[Q];
  c10::OptionalDeviceGuard guard(q.device());
  variable_list gradients;
  gradients.reserve(3);
  for (int i = 0; i < 3; ++i)
    gradients.push_back(at::empty_strided(tensors[Q + i].sizes(), pass.strides[i], tensors[Q + i].options()));
  auto buffer = at::empty({pass.elements}, q.options().dtype(at::kFloat));
  const uint64_t addresses[] = {
      address(tensors[D_OUT]), address(q), address(tensors[K]), address(tensors[V]), address(tensors[OUT]),
      address(tensors[LSE]), address(buffer), 0, address(gradients[0]), address(gradients[1]),
      address(gradients[2]), address(tensors[CU_Q]), address(tensors[CU_K])};
  launch(pass.launches, q.device(), stream_of(q.device()), addresses);
  return gradients;
}

std::vector<int64_t> sizes_of(PyObject *tensor) { return THPVariable_Unpack(tensor).sizes().vec(); }

std::vector<int64_t> strides_of(PyObject *tensor) { return THPVariable_Unpack(tensor).strides().vec(); }

std::string bytes_of(PyObject *bytes) { return {PyBytes_AS_STRING(bytes), size_t(PyBytes_GET_SIZE(bytes))}; }

// Through `attnlib.dispatch`; leaves a Backward of this kind where there may be one. kind: null for none.
variable_list through_python(const std::array<at::Tensor, READ> &tensors, const Asked &asked, const Kind *kind) {
  Owned arguments(PyTuple_New(READ + 1));
  for (int i = 0; i < READ; ++i) {
    PyObject *tensor = THPVariable_Wrap(tensors[i]);  // None for one that is not there
    if (!tensor) throw python_error();
    PyTuple_SET_ITEM(arguments.object, i, tensor);
  }
  PyObject *options = asked->ptr(getPyInterpreter());
  Py_INCREF(options);
  PyTuple_SET_ITEM(arguments.object, READ, options);
  Owned found(PyObject_CallObject(slowly, arguments.object));
  PyObject *dq, *dk, *dv, *launches;
  Py_ssize_t elements;
  if (!PyArg_ParseTuple(found.object, "(OOO)On", &dq, &dk, &dv, &launches, &elements)) throw python_error();
  if (launches != Py_None && kind)
    prepare(backwards, *kind,
            {bytes_of(launches), elements, {strides_of(dq), strides_of(dk), strides_of(dv)}, asked});
  return {THPVariable_Unpack(dq), THPVariable_Unpack(dk), THPVariable_Unpack(dv)};
}

// What owns a node of autograd: `std::shared_ptr` or, from torch 2.14 on, `c10::intrusive_ptr`.
using Owner = decltype(torch::autograd::Edge::function);

template <class Made> Owner owner_of_new(Made *node) {
  if constexpr (requires { node->shared_from_this(); })
    return Owner(node, [](Made *old) { deleteNode(old); });  // of torch::autograd
  else
    return c10::intrusive_ptr<Made>::unsafe_steal_from_new(node);
}

template <class Made> Owner owner_of(Made *node) {
  if constexpr (requires { node->shared_from_this(); })
    return node->shared_from_this();
  else
    return c10::intrusive_ptr<Made>::reclaim_copy(node);
}

struct AttentionBackward : torch::autograd::Node {
  std::array<torch::autograd::SavedVariable, READ> saved;  // but D_OUT
  Asked asked;

  AttentionBackward(torch::autograd::edge_list &&edges, const Asked &asked)
      : Node(std::move(edges)), asked(asked) {}

  std::string name() const override { return "AttentionBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto &variable : saved) variable.reset_data();
  }

  bool describe(Kind &kind, const std::array<at::Tensor, READ> &tensors) const {
    kind.add(reinterpret_cast<int64_t>(asked->ptr(getPyInterpreter())));
    return std::all_of(tensors.begin(), tensors.end(), [&](const auto &tensor) { return kind.add(tensor); });
  }

  variable_list apply(variable_list &&gradients) override {
    if (!gradients[0].defined()) return variable_list(3);  // nothing flows back
    std::array<at::Tensor, READ> tensors;
    tensors[D_OUT] = gradients[0];
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int i = Q; i < READ; ++i) tensors[i] = saved[i].unpack(i == OUT ? owner_of(this) : nullptr);
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    struct Release {
      PyGILState_STATE gil;
      ~Release() { PyGILState_Release(gil); }
    } release{gil};
    try {
      Kind kind;
      if (at::GradMode::is_enabled() || !ordinary() || !describe(kind, tensors))
        return through_python(tensors, asked, nullptr);
      auto pass = find(backwards, kind);
      return pass ? run(*pass, tensors) : through_python(tensors, asked, &kind);
    } catch (python_error &error) {
      error.persist();
      throw;
    }
  }
};

// `out` was computed from q, k and v; `read` is what its backward pass reads, but for d_out.
void record(const std::array<at::Tensor, READ> &read, const Asked &asked) {
  auto *node = new AttentionBackward(torch::autograd::collect_next_edges(read[Q], read[K], read[V]), asked);
  const Owner owner = owner_of_new(node);
  torch::autograd::set_history(read[OUT], owner);
  for (int i = Q; i < READ; ++i) node->saved[i] = torch::autograd::SavedVariable(read[i], i == OUT);
}

// ---------------------------------------------------------------- forward

// The options of `attention`, in their order; those of `attention_decode` have False for `deterministic` and
// `split` in the place of `impl`. False where one is not of the usual type: Python has the error.
bool describe(Kind &kind, PyObject *options) {
  if (!PyTuple_Check(options) || PyTuple_GET_SIZE(options) != 6) return false;
  auto option = [&](int i) { return PyTuple_GET_ITEM(options, i); };
  PyObject *window = option(1), *scale = option(2), *choice = option(5);
  for (int i : {0, 3, 4}) {  // causal, return_lse, deterministic
    if (!PyBool_Check(option(i))) return false;
    kind.add(option(i) == Py_True);
  }
  kind.add(window != Py_None);
  if (window != Py_None) {
    if (!PyTuple_CheckExact(window) || PyTuple_GET_SIZE(window) != 2) return false;
    for (int i : {0, 1}) {
      PyObject *bound = PyTuple_GET_ITEM(window, i);
      int overflow = 0;
      if (!PyLong_CheckExact(bound)) return false;
      kind.add(PyLong_AsLongLongAndOverflow(bound, &overflow));
      if (overflow) return false;
    }
  }
  kind.add(scale != Py_None);
  if (scale != Py_None) {
    if (!PyFloat_CheckExact(scale) && !PyLong_CheckExact(scale)) return false;
    const double value = PyFloat_AsDouble(scale);
    if (PyErr_Occurred()) {  // an int beyond all bounds
      PyErr_Clear();
      return false;
    }
    int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    kind.add(bits);
  }
  if (choice == Py_None) {
    kind.add(0);
    return true;
  }
  if (PyLong_CheckExact(choice)) {  // a number of splits
    int overflow = 0;
    kind.add(1);
    kind.add(PyLong_AsLongLongAndOverflow(choice, &overflow));
    return !overflow;
  }
  // Of both functions: calls with a word that theirs does not know are never kept.
  static const char *const words[] = {"decode", "hopper", "triton", "reference", "none", "fixed", "stream_k"};
  for (int i = 0; i < 7; ++i) {
    if (!PyUnicode_CheckExact(choice) || PyUnicode_CompareWithASCIIString(choice, words[i])) continue;
    kind.add(i + 2);
    return true;
  }
  return false;
}

// A call of `attention` or of `attention_decode`.
struct Call {
  std::array<at::Tensor, DECODING> tensors;
  PyObject *options;
  bool differentiated;
  Kind kind;

  // False where it is one for Python. args: the tensors, and the options.
  bool parse(PyObject *const *args, Py_ssize_t count) {
    kind.add(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      const bool optional = i >= DENSE;
      if (!optional || args[i] != Py_None) {
        if (!THPVariable_CheckExact(args[i])) return false;
        tensors[i] = THPVariable_Unpack(args[i]);
      }
      if (!kind.add(tensors[i], !optional)) return false;
    }
    options = args[count];
    if (!describe(kind, options) || !ordinary()) return false;
    const auto device = tensors[0].device().type();
    if (count == DENSE && at::autocast::is_autocast_enabled(device))
      for (Py_ssize_t i = 0; i < DENSE; ++i)
        if (tensors[i].scalar_type() != at::autocast::get_autocast_dtype(device)) return false;
    auto wanted = [](const at::Tensor &tensor) { return tensor.defined() && tensor.requires_grad(); };
    differentiated = at::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), wanted);
    kind.add(differentiated);
    return count == DENSE || !differentiated;
  }
};

// The address of what programs draw their tiles from; 0 while a CUDA graph is captured, which has its own.
uint64_t counter_for(c10::Device device, uint64_t stream) {
  Owned captured(PyObject_CallNoArgs(capturing));
  if (captured.object != Py_False) return 0;
  const std::pair<int, uint64_t> key{device.index(), stream};
  auto found = counters.find(key);
  if (found == counters.end()) {
    Owned index(PyLong_FromLong(device.index()));
    Owned made(PyObject_CallOneArg(counter, index.object));
    found = counters.insert_or_assign(key, THPVariable_Unpack(made.object)).first;
  }
  return address(found->second);
}

// (out, LSE); neither is defined where Python has to do it.
std::pair<at::Tensor, at::Tensor> run(const Forward &pass, const Call &call) {
  const auto &given = call.tensors;
  const auto &q = given[0];
  at::Tensor out, lse, parts;
  c10::OptionalDeviceGuard guard(q.device());
  const auto stream = stream_of(q.device());
  const auto drawn = pass.counted ? counter_for(q.device(), stream) : 0;
  if (pass.counted && !drawn) return {};
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    out = at::empty_strided(pass.sizes, pass.strides, q.options());
    if (pass.lse) lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::kFloat));
    if (pass.scratch) parts = at::empty({pass.scratch}, q.options().dtype(at::kFloat));
  }
  // As `kernels/common/forward_plan.py` names them, q k v out lse counter cu_q cu_k, or `kernels/decode/launch.py`:
  // q k v out lse parts lengths starts page_table k_scale v_scale arrived.
  const uint64_t addresses[] = {
      address(q), address(given[1]), address(given[2]), address(out), address(lse),
      pass.scratch ? address(parts) : drawn, address(given[3]), address(given[4]), address(given[5]),
      address(given[6]), address(given[7]), 0};
  launch(pass.launches, q.device(), stream, addresses);
  if (call.differentiated) record({at::Tensor(), q, given[1], given[2], out, lse}, pass.asked);
  return {out, lse};
}

// ---------------------------------------------------------------- functions for Python

// How many tensors these arguments begin with; `more` follow them.
Py_ssize_t tensors_of(const char *function, Py_ssize_t count, Py_ssize_t more) {
  TORCH_CHECK_TYPE(count == DENSE + more || count == DECODING + more, function, ": expected ", DENSE + more, " or ",
                   DECODING + more, " arguments, got ", count);
  return count - more;
}

// attend(*tensors, options): what `attention` or `attention_decode` returns; None where Python has to do it.
PyObject *attend(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Call call;
  if (!call.parse(args, tensors_of("attend", count, 1))) Py_RETURN_NONE;
  auto pass = find(forwards, call.kind);
  if (!pass) Py_RETURN_NONE;
  auto [out, lse] = run(*pass, call);
  if (!out.defined()) Py_RETURN_NONE;
  if (PyTuple_GET_ITEM(call.options, 3) == Py_False) return THPVariable_Wrap(out);
  Owned first(THPVariable_Wrap(out)), second(THPVariable_Wrap(lse));
  return PyTuple_Pack(2, first.object, second.object);
  END_HANDLE_TH_ERRORS
}

// lacks(*tensors, options): whether calls like this one can be kept, and are not yet.
PyObject *lacks(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Call call;
  return PyBool_FromLong(call.parse(args, tensors_of("lacks", count, 1)) && !find(forwards, call.kind));
  END_HANDLE_TH_ERRORS
}

// keep(*tensors, options, out, lse_needed, launches, counted, scratch, asked): calls like this one are launched
// so, with an output like this one. A call whose options are wrong has not come so far.
PyObject *keep(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Call call;
  const Py_ssize_t tensors = tensors_of("keep", count, 7);
  if (!call.parse(args, tensors)) Py_RETURN_NONE;
  PyObject *const *rest = args + tensors + 1;  // out, lse_needed, launches, counted, scratch, asked
  const bool lse = rest[1] == Py_True, counted = rest[3] == Py_True;
  const int64_t scratch = PyLong_AsLongLong(rest[4]);
  if (PyErr_Occurred()) throw python_error();
  prepare(forwards, call.kind,
          {bytes_of(rest[2]), sizes_of(rest[0]), strides_of(rest[0]), lse, counted, scratch, owned(rest[5])});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// record(out, q, k, v, lse, cu_seqlens_q, cu_seqlens_k, asked): out was computed from q, k and v.
PyObject *record(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 8, "record: expected 8 arguments, got ", count);
  auto tensor = [&](int i) { return args[i] == Py_None ? at::Tensor() : THPVariable_Unpack(args[i]); };
  record({at::Tensor(), tensor(1), tensor(2), tensor(3), tensor(0), tensor(4), tensor(5), tensor(6)},
         owned(args[7]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *forget(PyObject *, PyObject *) {
  forwards.clear();
  backwards.clear();
  counters.clear();
  Py_RETURN_NONE;
}

// connect(launch_all, slowly, counter, capturing, runtime): of `direct.c`; of `attnlib.node`; of
// `kernels/common/counters.py`; of PyTorch, whether the current stream is captured; `triton.knobs.runtime`.
PyObject *connect(PyObject *, PyObject *args) {
  PyObject *capsule, *given[4];
  if (!PyArg_ParseTuple(args, "OOOOO", &capsule, &given[0], &given[1], &given[2], &given[3])) return nullptr;
  void *pointer = PyCapsule_GetPointer(capsule, "attnlib_direct.launch_all");
  if (!pointer) return nullptr;
  launch_all = reinterpret_cast<decltype(launch_all)>(pointer);
  PyObject **const places[] = {&slowly, &counter, &capturing, &runtime};
  for (int i = 0; i < 4; ++i) {
    Py_INCREF(given[i]);
    Py_XSETREF(*places[i], given[i]);
  }
  Py_RETURN_NONE;
}

PyCFunction fast(_PyCFunctionFast function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(function));
}

PyMethodDef methods[] = {
    {"attend", fast(attend), METH_FASTCALL, "attend(*tensors, options)"},
    {"lacks", fast(lacks), METH_FASTCALL, "lacks(*tensors, options)"},
    {"keep", fast(keep), METH_FASTCALL,
     "keep(*tensors, options, out, lse_needed, launches, counted, scratch, asked)"},
    {"record", fast(record), METH_FASTCALL, "record(out, q, k, v, lse, cu_seqlens_q, cu_seqlens_k, asked)"},
    {"forget", forget, METH_NOARGS, "forget(): what is prepared."},
    {"connect", connect, METH_VARARGS, "connect(launch_all, slowly, counter, capturing, runtime)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "attnlib_node", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_attnlib_node() {
  enter_hook = PyUnicode_InternFromString("launch_enter_hook");
  exit_hook = PyUnicode_InternFromString("launch_exit_hook");
  calls = PyUnicode_InternFromString("calls");
  return PyModule_Create(&module);
}
