/* A CUDA driver that computes nothing and writes down what it is asked for. Python reads the records. */

#include <stdint.h>
#include <string.h>

#include "cuda.h"

enum { MAX_KERNELS = 64, MAX_LAUNCHES = 64, MAX_PARAMS = 192 };

/* A tensor map is its own record: what was encoded, in the 128 bytes that the driver would fill. */
typedef struct {
  uint64_t address;
  uint8_t dtype, rank, small, interleave, swizzle, promotion, fill, padding;
  uint64_t shape[5], strides[4];
  uint32_t box[5];
  uint8_t steps[8];
} Encoded;

_Static_assert(sizeof(Encoded) <= sizeof(CUtensorMap), "a record has to fit a tensor map");

typedef struct {
  uint64_t function, stream, context;
  uint32_t grid[3], block[3], shared, attributes, params;
  uint8_t values[MAX_PARAMS][128];
} Launched;

typedef struct {
  uint64_t function;
  uint32_t params, sizes[MAX_PARAMS];
} Kernel;

static Kernel kernels[MAX_KERNELS];
static int kernel_count;
Launched fake_launches[MAX_LAUNCHES];
int fake_launch_count;
int fake_retained = -1; /* device whose context was asked for last */
int fake_version = 13000;
static int encode_result, launch_result;
static __thread CUcontext current;

/* A kernel's parameters, by their sizes in bytes: what the real driver knows from its binary. */
int fake_kernel(uint64_t function, uint32_t params, const uint32_t *sizes) {
  if (kernel_count == MAX_KERNELS || params > MAX_PARAMS) return -1;
  Kernel *kernel = &kernels[kernel_count++];
  kernel->function = function;
  kernel->params = params;
  memcpy(kernel->sizes, sizes, params * sizeof *sizes);
  return 0;
}

void fake_forget(void) {
  kernel_count = fake_launch_count = encode_result = launch_result = 0;
  fake_retained = -1;
  current = NULL;
}

/* What the next calls return. */
void fake_fail(int encode, int launch) {
  encode_result = encode;
  launch_result = launch;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType dtype, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  Encoded made = {0};
  if (encode_result) return encode_result;
  if (rank < 1 || rank > 5) return CUDA_ERROR_INVALID_VALUE;
  made.address = (uint64_t)address;
  made.dtype = dtype, made.rank = rank, made.interleave = interleave;
  made.swizzle = swizzle, made.promotion = promotion, made.fill = fill;
  for (unsigned i = 0; i < rank; ++i) made.shape[i] = shape[i], made.box[i] = box[i], made.steps[i] = steps[i];
  for (unsigned i = 0; i + 1 < rank; ++i) made.strides[i] = strides[i];
  made.small = 0x20; /* bit 21 of the second 8 bytes, which Triton 3.7 clears where a tensor is small */
  memset(map, 0, sizeof *map);
  memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

static CUresult keep(CUfunction function, const unsigned *size, unsigned shared, CUstream stream,
                     unsigned attributes, void **values) {
  Kernel *kernel = kernels;
  if (launch_result) return launch_result;
  while (kernel < kernels + kernel_count && kernel->function != (uint64_t)function) ++kernel;
  if (kernel == kernels + kernel_count || fake_launch_count == MAX_LAUNCHES) return CUDA_ERROR_INVALID_HANDLE;
  Launched *made = &fake_launches[fake_launch_count++];
  memset(made, 0, sizeof *made);
  made->function = (uint64_t)function, made->stream = (uint64_t)stream, made->context = (uint64_t)current;
  memcpy(made->grid, size, sizeof made->grid);
  memcpy(made->block, size + 3, sizeof made->block);
  made->shared = shared, made->attributes = attributes, made->params = kernel->params;
  for (unsigned i = 0; i < kernel->params; ++i) memcpy(made->values[i], values[i], kernel->sizes[i]);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, CUstream stream,
                        void **values, void **extra) {
  unsigned size[6] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
  return extra ? CUDA_ERROR_INVALID_VALUE : keep(function, size, shared, stream, 0, values);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **values, void **extra) {
  unsigned size[6] = {how->gridDimX,  how->gridDimY,  how->gridDimZ,
                      how->blockDimX, how->blockDimY, how->blockDimZ};
  if (extra) return CUDA_ERROR_INVALID_VALUE;
  return keep(function, size, how->sharedMemBytes, how->hStream, how->numAttrs, values);
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : NULL;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  fake_retained = device;
  *context = (CUcontext)(uintptr_t)(0xC0 + device);
  return device < 8 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
  *version = fake_version;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
