// The backward pass of `attnlib.attention` as a node of PyTorch's autograd, so that its engine finds C++ where
// a `torch.autograd.Function` would bring it to Python.
//
// Decisions stay in Python. The first backward pass of a kind goes through `attnlib.dispatch` and leaves a
// `Pass`: the bytes that `direct.c` launches, and the layouts of the gradients. Those after it only allocate
// and launch. What counts as the same kind is in `kind_of`.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <ATen/DeviceGuard.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/SafePyObject.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

using torch::autograd::variable_list;

// What `kernels/common/backward_plan.py` calls TENSORS: d_out q k v out lse buffer none dq dk dv cu_q cu_k.
enum { D_OUT, Q, K, V, OUT, LSE, CU_Q, CU_K, READ };
constexpr size_t KINDS = 1024;  // that stay prepared, as `signature.PREPARED`

struct Owned {  // a reference of Python's, used and dropped with the GIL held
  PyObject *object;
  explicit Owned(PyObject *object) : object(object) {
    if (!object) throw python_error();
  }
  Owned(const Owned &) = delete;
  ~Owned() { Py_DECREF(object); }
};

// How a backward pass of some kind is launched without Python.
struct Pass {
  std::string launches;
  int64_t elements;  // of the float32 buffer that the launches share
  std::array<std::vector<int64_t>, 3> strides;  // of dq, dk and dv
  c10::SafePyObject asked;  // lives as long as its address is part of a kind
};

// Guarded by the GIL.
std::unordered_map<std::string, std::shared_ptr<const Pass>> passes;
PyObject *slowly, *stream_of;  // functions of `attnlib.node`
int (*launch_all)(const char *, size_t, long, uint64_t, const uint64_t *, uint32_t);

template <typename T>
void append(std::string &bytes, const T &value) {
  bytes.append(reinterpret_cast<const char *>(&value), sizeof value);
}

// What the launches depend on besides addresses. Empty where an address is not one that TMA takes.
std::string kind_of(const std::array<at::Tensor, READ> &tensors, PyObject *asked) {
  std::string kind;
  kind.reserve(1024);
  append(kind, asked);
  for (const auto &tensor : tensors) {
    append(kind, tensor.defined());
    if (!tensor.defined()) continue;
    if (!tensor.has_storage() || tensor.layout() != at::kStrided) return {};
    if (reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl()->data()) % 16) return {};
    // Those of autograd depend on who asks for a gradient, which the launches do not.
    append(kind, (tensor.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView).raw_repr());
    append(kind, tensor.scalar_type());
    append(kind, tensor.device());
    append(kind, tensor.dim());
    for (int64_t size : tensor.sizes()) append(kind, size);
    for (int64_t stride : tensor.strides()) append(kind, stride);
  }
  return kind;
}

variable_list launch(const Pass &pass, const std::array<at::Tensor, READ> &tensors, uint64_t stream) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto &q = tensors[Q];
  c10::OptionalDeviceGuard guard(q.device());
  variable_list gradients;
  gradients.reserve(3);
  for (int i = 0; i < 3; ++i)
    gradients.push_back(at::empty_strided(tensors[Q + i].sizes(), pass.strides[i], tensors[Q + i].options()));
  auto buffer = at::empty({pass.elements}, q.options().dtype(at::kFloat));
  auto address = [](const at::Tensor &tensor) {
    return tensor.defined() ? reinterpret_cast<uint64_t>(tensor.data_ptr()) : 0;
  };
  const uint64_t addresses[] = {
      address(tensors[D_OUT]), address(q), address(tensors[K]), address(tensors[V]), address(tensors[OUT]),
      address(tensors[LSE]), address(buffer), 0, address(gradients[0]), address(gradients[1]),
      address(gradients[2]), address(tensors[CU_Q]), address(tensors[CU_K])};
  if (launch_all(pass.launches.data(), pass.launches.size(), q.get_device(), stream, addresses,
                 std::size(addresses)))
    throw python_error();
  return gradients;
}

std::vector<int64_t> strides_of(PyObject *tensor) { return THPVariable_Unpack(tensor).strides().vec(); }

// Through `attnlib.dispatch`; leaves a Pass where there may be one.
variable_list through_python(const std::array<at::Tensor, READ> &tensors, const c10::SafePyObject &asked,
                             const std::string &kind) {
  Owned arguments(PyTuple_New(READ + 1));
  for (int i = 0; i < READ; ++i) {
    PyObject *tensor = THPVariable_Wrap(tensors[i]);  // None for one that is not there
    if (!tensor) throw python_error();
    PyTuple_SET_ITEM(arguments.object, i, tensor);
  }
  PyObject *options = asked.ptr(getPyInterpreter());
  Py_INCREF(options);
  PyTuple_SET_ITEM(arguments.object, READ, options);
  Owned found(PyObject_CallObject(slowly, arguments.object));
  PyObject *dq, *dk, *dv, *launches;
  Py_ssize_t elements;
  if (!PyArg_ParseTuple(found.object, "(OOO)On", &dq, &dk, &dv, &launches, &elements)) throw python_error();
  if (launches != Py_None && !kind.empty()) {
    Py_INCREF(options);
    if (passes.size() >= KINDS) passes.clear();
    passes[kind] = std::make_shared<Pass>(Pass{
        std::string(PyBytes_AS_STRING(launches), PyBytes_GET_SIZE(launches)), elements,
        {strides_of(dq), strides_of(dk), strides_of(dv)}, c10::SafePyObject(options, getPyInterpreter())});
  }
  return {THPVariable_Unpack(dq), THPVariable_Unpack(dk), THPVariable_Unpack(dv)};
}

struct AttentionBackward : torch::autograd::Node {
  std::array<torch::autograd::SavedVariable, READ> saved;  // but D_OUT
  c10::SafePyObject asked;

  AttentionBackward(torch::autograd::edge_list &&edges, PyObject *asked)
      : Node(std::move(edges)), asked(asked, getPyInterpreter()) {}

  std::string name() const override { return "AttentionBackward"; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto &variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list &&gradients) override {
    if (!gradients[0].defined()) return variable_list(3);  // nothing flows back
    std::array<at::Tensor, READ> tensors;
    tensors[D_OUT] = gradients[0];
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (int i = Q; i < READ; ++i) tensors[i] = saved[i].unpack(i == OUT ? shared_from_this() : nullptr);
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    struct Release {
      PyGILState_STATE gil;
      ~Release() { PyGILState_Release(gil); }
    } release{gil};
    try {
      std::string kind;
      if (!at::GradMode::is_enabled()) {
        kind = kind_of(tensors, asked.ptr(getPyInterpreter()));
        auto found = passes.find(kind);
        if (found != passes.end()) {
          auto pass = found->second;
          Owned device(PyLong_FromLong(tensors[Q].get_device()));
          Owned stream(PyObject_CallOneArg(stream_of, device.object));
          if (stream.object != Py_None) return launch(*pass, tensors, PyLong_AsUnsignedLongLong(stream.object));
        }
      }
      return through_python(tensors, asked, kind);
    } catch (python_error &error) {
      error.persist();
      throw;
    }
  }
};

// record(out, q, k, v, lse, cu_seqlens_q, cu_seqlens_k, asked): out was computed from q, k and v.
PyObject *record(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 8, "record: expected 8 arguments, got ", count);
  auto tensor = [&](int i) { return args[i] == Py_None ? at::Tensor() : THPVariable_Unpack(args[i]); };
  auto out = tensor(0), q = tensor(1), k = tensor(2), v = tensor(3);
  Py_INCREF(args[7]);
  auto node = std::shared_ptr<AttentionBackward>(
      new AttentionBackward(torch::autograd::collect_next_edges(q, k, v), args[7]),
      torch::autograd::deleteNode);
  torch::autograd::set_history(out, node);
  const at::Tensor read[READ] = {{}, q, k, v, out, tensor(4), tensor(5), tensor(6)};
  for (int i = Q; i < READ; ++i) node->saved[i] = torch::autograd::SavedVariable(read[i], i == OUT);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject *forget(PyObject *, PyObject *) {
  passes.clear();
  Py_RETURN_NONE;
}

// connect(launch, slowly, stream_of): `launch_all` of direct.c, and two functions of `attnlib.node`.
PyObject *connect(PyObject *, PyObject *args) {
  PyObject *capsule;
  if (!PyArg_ParseTuple(args, "OOO", &capsule, &slowly, &stream_of)) return nullptr;
  void *pointer = PyCapsule_GetPointer(capsule, "attnlib_direct.launch_all");
  if (!pointer) return nullptr;
  launch_all = reinterpret_cast<decltype(launch_all)>(pointer);
  Py_INCREF(slowly);
  Py_INCREF(stream_of);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"record", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(record)), METH_FASTCALL,
     "record(out, q, k, v, lse, cu_seqlens_q, cu_seqlens_k, asked)"},
    {"forget", forget, METH_NOARGS, "forget(): prepared passes."},
    {"connect", connect, METH_VARARGS, "connect(launch, slowly, stream_of)"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "attnlib_node", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_attnlib_node() { return PyModule_Create(&module); }
