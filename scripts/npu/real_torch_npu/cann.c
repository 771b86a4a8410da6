// What torch_npu calls of CANN before a kernel runs, on host memory; kernels themselves do nothing. Compiled by library.py, which
// appends an empty function for every other name that torch_npu needs.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static long handle[64];  // streams, events, contexts, scalars and lists: never read

static int allocate(void **pointer, size_t size) { return posix_memalign(pointer, 512, size + 512); }
static int release(void *pointer) { free(pointer); return 0; }
static int give_handle(void **out) { *out = handle; return 0; }

int aclrtMalloc(void **pointer, size_t size, int policy) { return allocate(pointer, size); }
int aclrtMallocAlign32(void **pointer, size_t size, int policy) { return allocate(pointer, size); }
int aclrtMallocHost(void **pointer, size_t size) { return allocate(pointer, size); }
int aclrtFree(void *pointer) { return release(pointer); }
int aclrtFreeHost(void *pointer) { return release(pointer); }
int aclrtMemcpy(void *to, size_t limit, const void *from, size_t size, int kind) { memcpy(to, from, size); return 0; }
int aclrtMemcpyAsync(void *to, size_t limit, const void *from, size_t size, int kind, void *stream) { memcpy(to, from, size); return 0; }
int aclrtMemset(void *to, size_t limit, int value, size_t size) { memset(to, value, size); return 0; }
int aclrtGetMemInfo(int kind, size_t *available, size_t *total) { *available = *total = (size_t)64 << 30; return 0; }

int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
int aclrtGetDevice(int32_t *device) { *device = 0; return 0; }
const char *aclrtGetSocName(void) { return "Ascend910B3"; }
int aclrtCreateStream(void **out) { return give_handle(out); }
int aclrtCreateStreamWithConfig(void **out, uint32_t priority, uint32_t flags) { return give_handle(out); }
int aclrtCreateEventWithFlag(void **out, uint32_t flags) { return give_handle(out); }
int aclrtCreateEventExWithFlag(void **out, uint32_t flags) { return give_handle(out); }
int aclrtGetCurrentContext(void **out) { return give_handle(out); }

struct tensor { uint64_t dimensions; int64_t sizes[16]; };  // torch_npu reads shapes back
void *aclCreateTensor(const int64_t *sizes, uint64_t dimensions, int type, const int64_t *strides, int64_t offset, int format,
                      const int64_t *storage, uint64_t storage_dimensions, void *data) {
    struct tensor *result = calloc(1, sizeof *result);
    result->dimensions = dimensions < 16 ? dimensions : 16;
    memcpy(result->sizes, sizes, 8 * result->dimensions);
    return result;
}
int aclDestroyTensor(void *tensor) { return release(tensor); }
int aclGetViewShape(struct tensor *tensor, int64_t **sizes, uint64_t *dimensions) {
    *dimensions = tensor->dimensions;
    *sizes = malloc(sizeof tensor->sizes);
    memcpy(*sizes, tensor->sizes, sizeof tensor->sizes);
    return 0;
}
void *aclCreateScalar(void *value, int type) { return handle; }
void *aclCreateIntArray(const int64_t *values, uint64_t size) { return handle; }
void *aclCreateFloatArray(const float *values, uint64_t size) { return handle; }
void *aclCreateBoolArray(const char *values, uint64_t size) { return handle; }
void *aclCreateTensorList(void **tensors, uint64_t size) { return handle; }
void *aclCreateScalarList(void **scalars, uint64_t size) { return handle; }
