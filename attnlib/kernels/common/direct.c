/* Launch compiled kernels, one after the other, with one call from Python.

   A launch is described once, by `attnlib.kernels.common.direct.pack`, as a block of bytes: a header, the
   kernel's parameters in order, and its TMA descriptors. What changes from call to call is the stream and the
   addresses of the tensors. So a launch encodes the descriptors, puts the addresses where they belong, and
   calls the driver; Python binds no argument. The driver gets what it gets from Triton, but for one property of
   descriptors (`promotion`). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

/* direct.py puts MAX_PARAMS, MAX_MAPS and MAX_TENSORS ahead of this file. */
enum { OVERLAPS = 1, MENDED = 2 }; /* flags of a launch */
enum { IMMEDIATE = 0, ADDRESS = 1, TENSOR_MAP = 2 };

typedef struct {
  uint64_t function;
  uint32_t grid[3];
  uint32_t threads;
  uint32_t shared_bytes;
  uint32_t params;
  uint32_t maps;
  uint32_t flags;
  uint32_t padding[2];
} Header;

typedef struct {
  uint32_t kind;
  uint32_t index; /* of the tensor or of the map */
  uint64_t value; /* of an immediate, its bytes from the lowest on; of an address, the offset in bytes */
} Param;

typedef struct {
  uint32_t tensor, dtype, rank, swizzle;
  uint32_t box[5];
  uint32_t element; /* its size in bytes */
  uint64_t offset;     /* in bytes from the tensor's address */
  uint64_t shape[5];   /* innermost first, in elements */
  uint64_t strides[5]; /* of all but the innermost, in bytes */
} Map;

static CUresult (*encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                          const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                          CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, CUstream, void **, void **);
static CUresult (*launch_kernel_with)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*error_string)(CUresult, const char **);
static CUresult (*current_context)(CUcontext *);
static CUresult (*set_context)(CUcontext);
static CUresult (*retain_context)(CUcontext *, CUdevice);
static int driver_version;
static PyObject *data_ptr; /* the name of the method */

static PyObject *failed(const char *what, CUresult result) {
  const char *reason = NULL;
  if (error_string) error_string(result, &reason);
  return PyErr_Format(PyExc_RuntimeError, "%s failed: %s (CUDA error %d)", what, reason ? reason : "unknown",
                      (int)result);
}

static void *symbol(void *library, const char *name) {
  void *found = dlsym(library, name);
  if (!found) PyErr_Format(PyExc_ImportError, "the CUDA driver has no function %s", name);
  return found;
}

/* load(path): the driver's library. */
static PyObject *load(PyObject *self, PyObject *path) {
  const char *name = PyUnicode_AsUTF8(path);
  if (!name) return NULL;
  void *library = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
  if (!library) return PyErr_Format(PyExc_ImportError, "%s can't be opened: %s", name, dlerror());
  if (!(encode = symbol(library, "cuTensorMapEncodeTiled"))) return NULL;
  if (!(launch_kernel = symbol(library, "cuLaunchKernel"))) return NULL;
  if (!(launch_kernel_with = symbol(library, "cuLaunchKernelEx"))) return NULL;
  if (!(error_string = symbol(library, "cuGetErrorString"))) return NULL;
  if (!(current_context = symbol(library, "cuCtxGetCurrent"))) return NULL;
  if (!(set_context = symbol(library, "cuCtxSetCurrent"))) return NULL;
  if (!(retain_context = symbol(library, "cuDevicePrimaryCtxRetain"))) return NULL;
  CUresult (*ask_version)(int *) = symbol(library, "cuDriverGetVersion");
  if (!ask_version) return NULL;
  CUresult result = ask_version(&driver_version);
  if (result != CUDA_SUCCESS) return failed("cuDriverGetVersion", result);
  Py_RETURN_NONE;
}

/* 0 where the thread has a context, or has got the device's; a thread of Python's begins without one. */
static CUresult ensure_context(uint32_t device) {
  CUcontext context = NULL;
  CUresult result = current_context(&context);
  if (result == CUDA_SUCCESS && context) return result;
  result = retain_context(&context, (CUdevice)device);
  return result == CUDA_SUCCESS ? set_context(context) : result;
}

/* How many addresses, or -1 with an error set. */
static Py_ssize_t addresses_of(PyObject *tensors, uint64_t *addresses) {
  if (!PyTuple_Check(tensors)) {
    PyErr_Format(PyExc_TypeError, "tensors: expected a tuple, got %R", tensors);
    return -1;
  }
  Py_ssize_t count = PyTuple_GET_SIZE(tensors);
  if (count > MAX_TENSORS) {
    PyErr_Format(PyExc_TypeError, "tensors: expected at most %d, got %zd", MAX_TENSORS, count);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject *tensor = PyTuple_GET_ITEM(tensors, i);
    addresses[i] = 0;
    if (tensor == Py_None) continue;
    PyObject *address = PyObject_CallMethodNoArgs(tensor, data_ptr);
    if (!address) return -1;
    addresses[i] = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    if (PyErr_Occurred()) return -1;
  }
  return count;
}

/* Drivers up to CUDA 13.1 set a bit of descriptors of tensors below 128 KiB that can make Blackwell GPUs fail
   (known issues in the notes of NVIDIA's driver 595.71.05). Hopper GPUs ignore it. It is cleared as Triton does
   it, which counts in 32 bits: so the windows of varlen calls, which go around 2^64 bytes, count as what
   they reach. */
static void mend(CUtensorMap *made, const Map *map) {
  uint32_t reach = 1;
  if (driver_version > 13010) return;
  for (uint32_t i = 0; i < map->rank; ++i)
    reach += (uint32_t)(map->shape[i] - 1) * (i ? (uint32_t)map->strides[i - 1] : map->element);
  if ((int32_t)reach < 128 * 1024) ((uint64_t *)made)[1] &= ~(1ull << 21);
}

/* How much the L2 reads from memory where a copy misses it. A copy has up to 128 bytes of a row, and Triton always
   asks for 128. Where rows have 256 bytes or more, what lies beside them is needed soon, by the copy of the next
   columns. The backward pass at D = 128 without a mask is 1.5 to 3.5% faster by it, nothing slower that was timed
   (docs/lab/hopper-backward.md, 2026-12-01). */
static CUtensorMapL2promotion promotion(const Map *map) {
  return map->shape[0] * map->element < 256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                            : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
}

/* Launch one kernel. With OVERLAPS it may begin before the kernel ahead of it in the stream is done: it waits
   for that itself (griddepcontrol.wait). */
static CUresult enqueue(const Header *header, CUstream stream, void **values) {
  CUfunction function = (CUfunction)header->function;
  const uint32_t *grid = header->grid;
  if (!(header->flags & OVERLAPS))
    return launch_kernel(function, grid[0], grid[1], grid[2], header->threads, 1, 1, header->shared_bytes, stream,
                         values, NULL);
  CUlaunchAttribute overlaps = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION};
  overlaps.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig how = {.gridDimX = grid[0], .gridDimY = grid[1], .gridDimZ = grid[2], .blockDimX = header->threads,
                        .blockDimY = 1, .blockDimZ = 1, .sharedMemBytes = header->shared_bytes, .hStream = stream,
                        .attrs = &overlaps, .numAttrs = 1};
  return launch_kernel_with(&how, function, values, NULL);
}

/* Bytes of the description of one kernel; 0 with an error set where it is damaged. */
static size_t launch_one(const char *bytes, size_t left, CUstream stream, const uint64_t *addresses,
                         uint32_t tensors) {
  static const cuuint32_t every_element[5] = {1, 1, 1, 1, 1};
  Header header;
  size_t size = sizeof header;
  if (left >= size) {
    memcpy(&header, bytes, sizeof header);
    size += (size_t)header.params * sizeof(Param) + (size_t)header.maps * sizeof(Map);
  }
  if (left < size || header.params > MAX_PARAMS || header.maps > MAX_MAPS) {
    PyErr_SetString(PyExc_ValueError, "launch: the description is damaged");
    return 0;
  }
  const Param *params = (const Param *)(bytes + sizeof header);
  const Map *given = (const Map *)(params + header.params);
  CUtensorMap maps[MAX_MAPS];
  uint64_t pointers[MAX_PARAMS];
  void *values[MAX_PARAMS];
  for (uint32_t i = 0; i < header.maps; ++i) {
    const Map *map = given + i;
    if (map->tensor >= tensors) {
      PyErr_Format(PyExc_TypeError, "tensors: expected more than %d", (int)tensors);
      return 0;
    }
    CUresult result = encode(
        &maps[i], (CUtensorMapDataType)map->dtype, map->rank, (void *)(addresses[map->tensor] + map->offset),
        (const cuuint64_t *)map->shape, (const cuuint64_t *)map->strides, map->box, every_element,
        CU_TENSOR_MAP_INTERLEAVE_NONE, (CUtensorMapSwizzle)map->swizzle, promotion(map),
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
      failed("cuTensorMapEncodeTiled", result);
      return 0;
    }
    if (header.flags & MENDED) mend(&maps[i], map);
  }
  for (uint32_t i = 0; i < header.params; ++i) {
    const Param *param = params + i;
    if (param->kind == TENSOR_MAP && param->index < header.maps) {
      values[i] = &maps[param->index];
    } else if (param->kind == ADDRESS && param->index < tensors) {
      uint64_t address = addresses[param->index];
      pointers[i] = address ? address + param->value : 0;
      values[i] = &pointers[i];
    } else if (param->kind == IMMEDIATE) {
      values[i] = (void *)&param->value;
    } else {
      PyErr_Format(PyExc_TypeError, "tensors: expected more than %d", (int)tensors);
      return 0;
    }
  }
  CUresult result = enqueue(&header, stream, values);
  if (result != CUDA_SUCCESS) {
    failed("cuLaunchKernel", result);
    return 0;
  }
  return size;
}

/* All descriptions, in order: 0, or -1 with an error set. `node.cpp` calls it too. */
static int launch_all(const char *bytes, size_t left, long device, uint64_t stream, const uint64_t *addresses,
                      uint32_t tensors) {
  if (!launch_kernel) {
    PyErr_SetString(PyExc_RuntimeError, "launch: the CUDA driver is not loaded");
    return -1;
  }
  CUresult result = ensure_context((uint32_t)device);
  if (result != CUDA_SUCCESS) {
    failed("setting the CUDA context", result);
    return -1;
  }
  while (left) {
    size_t size = launch_one(bytes, left, (CUstream)stream, addresses, tensors);
    if (!size) return -1;
    bytes += size;
    left -= size;
  }
  return 0;
}

/* launch(descriptions, device, stream, tensors): all of them, in order. */
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 4 || !PyBytes_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "launch: expected bytes, a device, a stream and a tuple of tensors");
    return NULL;
  }
  long device = PyLong_AsLong(args[1]);
  uint64_t stream = PyLong_AsUnsignedLongLong(args[2]);
  if (PyErr_Occurred()) return NULL;
  uint64_t addresses[MAX_TENSORS];
  Py_ssize_t tensors = addresses_of(args[3], addresses);
  if (tensors < 0) return NULL;
  if (launch_all(PyBytes_AS_STRING(args[0]), (size_t)PyBytes_GET_SIZE(args[0]), device, stream, addresses,
                 (uint32_t)tensors))
    return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"load", load, METH_O, "load(path): open the CUDA driver's library."},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch(descriptions, device, stream, tensors)"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "attnlib_direct", NULL, -1, methods};

PyMODINIT_FUNC PyInit_attnlib_direct(void) {
  data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject *made = data_ptr ? PyModule_Create(&module) : NULL;
  PyObject *capsule = made ? PyCapsule_New((void *)launch_all, "attnlib_direct.launch_all", NULL) : NULL;
  if (!capsule) return NULL;
  return PyModule_AddObject(made, "launch_all", capsule) ? NULL : made;
}
