// Stands in for libcute_dsl_runtime.so: the same entry points, without a driver.
//
// The host code that CuTe DSL JIT-compiles calls these to load a cubin, to find a kernel and to
// launch it. Loads, launches and tensor-map encodings go to host_callbacks.py; memory calls act on
// host memory; streams and events do nothing, because a launch here returns when the kernel is done.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  kSuccess = 0,
  kErrorInvalidValue = 1,
  kErrorMemoryAllocation = 2,
  kErrorNotSupported = 801,
};

// cudaLaunchAttribute: 4 bytes of id, 4 of padding, 64 of value.
enum { kAttributeClusterDimension = 4, kAttributeProgrammaticStreamSerialization = 6 };
typedef struct {
  int id;
  int padding;
  union {
    unsigned cluster[3];
    int allowed;
    char bytes[64];
  } value;
} LaunchAttribute;

typedef struct {
  unsigned grid[3];
  unsigned block[3];
  size_t dynamic_smem_bytes;
  void *stream;
  LaunchAttribute *attributes;
  unsigned num_attributes;
} LaunchConfig;

typedef struct {
  uint64_t library;
  char *name;
} Kernel;

// dims: grid x y z, block x y z, cluster x y z, whether programmatic stream serialization is allowed.
typedef int (*LaunchCallback)(uint64_t library, const char *kernel, const unsigned *dims,
                              uint64_t dynamic_smem_bytes, void **arguments);
typedef int (*LoadCallback)(uint64_t library, const void *cubin);
typedef int (*EncodeCallback)(void *tensor_map, unsigned data_type, unsigned rank, uint64_t address,
                              const uint64_t *sizes, const uint64_t *strides_bytes,
                              const unsigned *box, const unsigned *element_strides,
                              unsigned interleave, unsigned swizzle, unsigned oob_fill);

static LaunchCallback launch_callback;
static LoadCallback load_callback;
static EncodeCallback encode_callback;

void fake_runtime_set_callbacks(LaunchCallback launch, LoadCallback load, EncodeCallback encode) {
  launch_callback = launch;
  load_callback = load;
  encode_callback = encode;
}

static int unsupported(const char *what) {
  fprintf(stderr, "emulator: the host code called %s, which has no stand-in\n", what);
  return kErrorNotSupported;
}

// ---- libraries and kernels

int _cudaLibraryLoadData(void **library, const void *cubin, void *o0, void *o1, unsigned n0,
                         void *o2, void *o3, unsigned n1) {
  static uint64_t next = 1;
  if (!load_callback) {
    fprintf(stderr, "emulator: a kernel was loaded outside `with emulated():`\n");
    return kErrorNotSupported;
  }
  uint64_t handle = next++;
  *library = (void *)handle;
  return load_callback(handle, cubin);
}
int _cuLibraryLoadData(void **library, const void *cubin, void *o0, void *o1, unsigned n0, void *o2,
                       void *o3, unsigned n1) {
  return _cudaLibraryLoadData(library, cubin, o0, o1, n0, o2, o3, n1);
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  // Never freed: the host code keeps the handle in a global for the life of the process.
  Kernel *k = malloc(sizeof *k);
  if (!k) return kErrorMemoryAllocation;
  k->library = (uint64_t)library;
  k->name = strdup(name);
  *kernel = k;
  return kSuccess;
}
int _cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  return _cudaLibraryGetKernel(kernel, library, name);
}
int _cudaLibraryUnload(void *library) { return kSuccess; }
int _cuLibraryUnload(void *library) { return kSuccess; }
int _cudaLibraryGetGlobal(void **p, size_t *n, void *library, const char *name) {
  return unsupported("cudaLibraryGetGlobal");
}
int _cuLibraryGetGlobal(void **p, size_t *n, void *library, const char *name) {
  return unsupported("cuLibraryGetGlobal");
}

// TVM-FFI-compiled host code loads its library once per process, into `slot`. `raise_error` sets the
// Python error; host_callbacks.py keeps the one to raise.
int cuda_dialect_init_library_once(void **slot, int (*init)(void **library),
                                   int (*load)(void **library, int device),
                                   void (*raise_error)(const char *kind, const char *message)) {
  if (*slot) return kSuccess;
  void *library = NULL;
  if (init(&library) || load(&library, 0)) {
    raise_error("RuntimeError", "the emulator could not load the compiled kernels");
    return -1;
  }
  *slot = library;
  return kSuccess;
}
int cuda_dialect_unload_library_once(void *library) { return kSuccess; }

// ---- launches

int _cudaLaunchKernelEx(const LaunchConfig *config, const Kernel *kernel, void **arguments) {
  unsigned dims[10] = {config->grid[0],  config->grid[1],  config->grid[2],
                       config->block[0], config->block[1], config->block[2], 1, 1, 1, 0};
  for (unsigned i = 0; i < config->num_attributes; i++) {
    if (config->attributes[i].id == kAttributeClusterDimension)
      memcpy(dims + 6, config->attributes[i].value.cluster, sizeof(unsigned[3]));
    if (config->attributes[i].id == kAttributeProgrammaticStreamSerialization)
      dims[9] = config->attributes[i].value.allowed != 0;
  }
  if (!launch_callback) {
    fprintf(stderr, "emulator: %s was launched outside `with emulated():`\n", kernel->name);
    return kErrorNotSupported;
  }
  return launch_callback(kernel->library, kernel->name, dims, config->dynamic_smem_bytes, arguments);
}
int _cudaLaunchKernel(const Kernel *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                      unsigned by, unsigned bz, void **arguments, size_t dynamic_smem_bytes,
                      void *stream) {
  LaunchConfig config = {{gx, gy, gz}, {bx, by, bz}, dynamic_smem_bytes, stream, NULL, 0};
  return _cudaLaunchKernelEx(&config, kernel, arguments);
}
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) { return kSuccess; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  return kSuccess;
}
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  *value = 0;
  return kSuccess;
}

// ---- device: one B200

enum { kAttributeMultiprocessors = 16, kAttributeMaxSharedPerBlockOptin = 97 };
int _cudaGetDevice(int *device) { *device = 0; return kSuccess; }
int _cuDeviceGet(int *device, int ordinal) { *device = ordinal; return kSuccess; }
int _cudaGetDeviceCount(int *count) { *count = 1; return kSuccess; }
int _cudaSetDevice(int device) { return kSuccess; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case kAttributeMultiprocessors: *value = 148; return kSuccess;
    case kAttributeMaxSharedPerBlockOptin: *value = 232448; return kSuccess;
    default: return unsupported("cudaDeviceGetAttribute for an attribute other than SM count and "
                                "shared memory");
  }
}

// ---- tensor maps (the DSL packs most inline; its experimental interface calls the driver)

int _cuTensorMapEncodeTiled(void *map, unsigned data_type, unsigned rank, void *address,
                            const uint64_t *sizes, const uint64_t *strides_bytes,
                            const unsigned *box, const unsigned *element_strides,
                            unsigned interleave, unsigned swizzle, unsigned l2_promotion,
                            unsigned oob_fill) {
  if (!encode_callback) return kErrorNotSupported;
  return encode_callback(map, data_type, rank, (uint64_t)address, sizes, strides_bytes, box,
                         element_strides, interleave, swizzle, oob_fill);
}

// ---- memory, streams, events

int _cudaMalloc(void **p, size_t n) { return posix_memalign(p, 512, n ? n : 1) ? kErrorMemoryAllocation : kSuccess; }
int _cudaMallocAsync(void **p, size_t n, void *stream) { return _cudaMalloc(p, n); }
int _cudaFree(void *p) { free(p); return kSuccess; }
int _cudaFreeAsync(void *p, void *stream) { return _cudaFree(p); }
int _cudaMemset(void *p, int v, size_t n) { memset(p, v, n); return kSuccess; }
int _cudaMemsetAsync(void *p, int v, size_t n, void *stream) { return _cudaMemset(p, v, n); }
int _cudaMemcpy(void *d, const void *s, size_t n, int kind) { memcpy(d, s, n); return kSuccess; }
int _cudaMemcpyAsync(void *d, const void *s, size_t n, int kind, void *stream) {
  return _cudaMemcpy(d, s, n, kind);
}
int _cudaDeviceSynchronize(void) { return kSuccess; }
int _cudaStreamSynchronize(void *stream) { return kSuccess; }
int _cudaStreamCreate(void **stream) { *stream = NULL; return kSuccess; }
int _cudaStreamDestroy(void *stream) { return kSuccess; }
int _cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return kSuccess; }
int _cudaEventCreate(void **event) { *event = NULL; return kSuccess; }
int _cudaEventDestroy(void *event) { return kSuccess; }
int _cudaEventRecord(void *event, void *stream) { return kSuccess; }

// ---- errors

const char *cuda_dialect_get_error_name(int error) { return "error in the emulator"; }
void cuda_dialect_print_on_error(int error) {
  if (error) fprintf(stderr, "emulator: the host code saw error %d\n", error);
}
// The real function aborts. Here the host code continues until the kept error is raised.
void cuda_dialect_assert_success(int error) { cuda_dialect_print_on_error(error); }
// TVM-FFI-compiled host code reports an error through a function that it passes: the message comes
// in parts. host_callbacks.py raises the error that it kept instead.
typedef void (*RaiseParts)(const char *kind, const char **parts, int num_parts);
static void raise_in_tvm_ffi(RaiseParts raise) {
  const char *parts[] = {"the emulator stopped a launch"};
  if (raise) raise("RuntimeError", parts, 1);
}
void CuteDSLRT_TVMFFISetRaisedCudaError(RaiseParts raise, int error) { raise_in_tvm_ffi(raise); }
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(RaiseParts raise, int error) {
  raise_in_tvm_ffi(raise);
}
