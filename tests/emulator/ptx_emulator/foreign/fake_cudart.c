// Stands in for libcudart under host code that nvcc compiled: kernels register themselves by name,
// and launches are handed to Python. It has only the functions that FlashMLA's and CUTLASS's host code calls.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kSuccess = 0, kErrorNotSupported = 801, kErrorInvalidDeviceFunction = 98 };
enum { kMaxKernels = 256, kMaxDepth = 16 };

typedef struct {
  unsigned x, y, z;
} Dim3;
typedef int (*LaunchCallback)(uint64_t library, const char *kernel, const unsigned *dims,
                              uint64_t dynamic_smem_bytes, void **arguments);
typedef int (*EncodeCallback)(void *tensor_map, unsigned data_type, unsigned rank, uint64_t address,
                              const uint64_t *sizes, const uint64_t *strides_bytes,
                              const unsigned *box, const unsigned *element_strides,
                              unsigned interleave, unsigned swizzle, unsigned oob_fill);

static LaunchCallback launch_callback;
static EncodeCallback encode_callback;
static struct {
  const void *host_function;
  const char *name;
} kernels[kMaxKernels];
static int num_kernels;
static struct {
  Dim3 grid, block;
  size_t smem;
  void *stream;
} pushed[kMaxDepth];
static int depth;
static int last_error;

void fake_cudart_set_callbacks(LaunchCallback launch, EncodeCallback encode) {
  launch_callback = launch;
  encode_callback = encode;
}

// ---- registration, run when the library is loaded

void **__cudaRegisterFatBinary(void *fatbin) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext,
                       size_t size, int constant, int global) {}
void __cudaRegisterFunction(void **handle, const char *host_function, char *device_function,
                            const char *name, int thread_limit, void *tid, void *bid, void *block,
                            void *grid, int *warp_size) {
  if (num_kernels == kMaxKernels) {
    fprintf(stderr, "emulator: more than %d kernels in one library\n", kMaxKernels);
    abort();
  }
  kernels[num_kernels].host_function = host_function;
  kernels[num_kernels++].name = name;
}

// ---- launches: kernel<<<grid, block, smem, stream>>>(...)

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t smem, void *stream) {
  if (depth == kMaxDepth) return 1;
  pushed[depth].grid = grid;
  pushed[depth].block = block;
  pushed[depth].smem = smem;
  pushed[depth++].stream = stream;
  return kSuccess;
}
int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *smem, void **stream) {
  if (!depth) return kErrorNotSupported;
  *grid = pushed[--depth].grid;
  *block = pushed[depth].block;
  *smem = pushed[depth].smem;
  *stream = pushed[depth].stream;
  return kSuccess;
}
int __cudaGetKernel(const char **kernel, const void *host_function) {
  for (int i = 0; i < num_kernels; i++)
    if (kernels[i].host_function == host_function) {
      *kernel = kernels[i].name;
      return kSuccess;
    }
  return kErrorInvalidDeviceFunction;
}

static int launch(const char *kernel, Dim3 grid, Dim3 block, const unsigned *cluster, size_t smem,
                  void **arguments) {
  // The last value, programmatic stream serialization, is off: its rules are not checked in foreign kernels.
  unsigned dims[10] = {grid.x,  grid.y,     grid.z,     block.x,   block.y,
                       block.z, cluster[0], cluster[1], cluster[2], 0};
  last_error = launch_callback(0, kernel, dims, smem, arguments);
  return last_error;
}
static const unsigned kNoCluster[3] = {1, 1, 1};

int __cudaLaunchKernel(const char *kernel, Dim3 grid, Dim3 block, void **arguments, size_t smem,
                       void *stream) {
  return launch(kernel, grid, block, kNoCluster, smem, arguments);
}
int cudaLaunchKernel(const void *host_function, Dim3 grid, Dim3 block, void **arguments,
                     size_t smem, void *stream) {
  const char *kernel;
  int error = __cudaGetKernel(&kernel, host_function);
  return error ? error : launch(kernel, grid, block, kNoCluster, smem, arguments);
}

typedef struct {
  int id;
  int padding;
  union {
    unsigned cluster[3];
    char bytes[64];
  } value;
} LaunchAttribute;
typedef struct {
  Dim3 grid, block;
  size_t smem;
  void *stream;
  LaunchAttribute *attributes;
  unsigned num_attributes;
} LaunchConfig;
enum { kAttributeClusterDimension = 4 };

int cudaLaunchKernelExC(const LaunchConfig *config, const void *host_function, void **arguments) {
  const char *kernel;
  int error = __cudaGetKernel(&kernel, host_function);
  if (error) return error;
  const unsigned *cluster = kNoCluster;
  for (unsigned i = 0; i < config->num_attributes; i++)
    if (config->attributes[i].id == kAttributeClusterDimension)
      cluster = config->attributes[i].value.cluster;
  return launch(kernel, config->grid, config->block, cluster, config->smem, arguments);
}
int cudaFuncSetAttribute(const void *host_function, int attribute, int value) { return kSuccess; }

// ---- the device: one B200, with memory that the host can write

int cudaGetDevice(int *device) {
  *device = 0;
  return kSuccess;
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  enum { kMultiProcessorCount = 16 };
  if (attribute != kMultiProcessorCount) return kErrorNotSupported;
  *value = 148;
  return kSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host_function,
                                                           int threads, size_t smem, unsigned flags) {
  *blocks = 1;
  return kSuccess;
}
int cudaMemsetAsync(void *device_memory, int value, size_t bytes, void *stream) {
  memset(device_memory, value, bytes);
  return kSuccess;
}

// ---- the driver's tensor maps

static int encode_tiled(void *map, unsigned data_type, unsigned rank, void *address,
                        const uint64_t *sizes, const uint64_t *strides_bytes, const unsigned *box,
                        const unsigned *element_strides, unsigned interleave, unsigned swizzle,
                        unsigned l2_promotion, unsigned oob_fill) {
  return encode_callback(map, data_type, rank, (uint64_t)address, sizes, strides_bytes, box,
                         element_strides, interleave, swizzle, oob_fill);
}
int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                     unsigned long long flags, int *status) {
  enum { kSymbolFound = 0, kSymbolNotFound = 1 };
  int found = !strcmp(symbol, "cuTensorMapEncodeTiled");
  *function = found ? (void *)encode_tiled : NULL;
  if (status) *status = found ? kSymbolFound : kSymbolNotFound;
  return kSuccess;
}
int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                            int *status) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, status);
}
int cudaDriverGetVersion(int *version) {
  *version = 13000;
  return kSuccess;
}

// ---- errors

int cudaGetLastError(void) {
  int error = last_error;
  last_error = kSuccess;
  return error;
}
int cudaPeekAtLastError(void) { return last_error; }
int cudaDeviceSynchronize(void) { return kSuccess; }
const char *cudaGetErrorString(int error) { return error ? "error in the emulator" : "no error"; }
const char *cudaGetErrorName(int error) { return cudaGetErrorString(error); }
