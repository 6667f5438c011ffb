// A driver of a device that computes nothing: memory is the host's, launches are counted. It stands for a real one where what is
// tested is not the results: that handles, copies and captures are used as the driver's documentation asks, and what is said when
// memory is short. MEMORY is the device's; TAKEN is what others have of it.
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef MEMORY
#define MEMORY (1ull << 30)
#endif
#ifndef TAKEN
#define TAKEN 0
#endif
#ifndef DEVICES
#define DEVICES 1
#endif

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, CAPTURED = 900 };
typedef unsigned long long address;
static _Atomic size_t used = TAKEN;
// The one context; whether a thread has it; and whether it captures.
static int primary;
static __thread int current, capturing;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
// What a thread captures: a count of kernels, and what libraries have put into its streams, which `hold` and `release` count.
typedef struct { int (*run)(void *what), (*hold)(void *what), (*release)(void *what); char what[96]; } work;
enum { MOST_WORK = 256 };
typedef struct { int launched, works; work list[MOST_WORK]; } graph;
static __thread graph captured;
// The work of a thread's stream goes on, and does not end.
static __thread volatile int *unending;
// What is allocated: an address knows its allocation.
static struct { address start; size_t bytes; } blocks[4096];
// Sizes stand before what is allocated.
static size_t *head(void *pointer) { return (size_t *)pointer - 32; }

// Whatever needs the context fails where none is current.
#define NEEDS_CONTEXT if (!current) return 201
#define FORBIDDEN_IN_CAPTURE if (capturing) return CAPTURED

int cuInit(unsigned flags) { return flags ? INVALID : OK; }
// NVRTC asks the driver for tables of its own, and does without.
int cuGetExportTable(const void **table, const void *id) { *table = 0; return 500; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuGetErrorName(int code, const char **name) { *name = code == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : 0; return OK; }
int cuGetErrorString(int code, const char **text) { *text = "out of memory"; return OK; }
int cuDeviceGetCount(int *count) { *count = DEVICES; return OK; }
int cuDeviceGet(int *device, int index) { *device = 7; return index < DEVICES ? OK : 101; }
int cuDeviceGetName(char *name, int len, int device) { snprintf(name, len, "Paper GPU"); return OK; }
int cuDeviceGetAttribute(int *value, unsigned attribute, int device) {
    switch (attribute) {
    case 1: *value = 1024; return OK; // threads per block
    case 8: *value = 49152; return OK; // shared memory per block
    case 16: *value = 132; return OK; // multiprocessors
    case 75: *value = 9; return OK;
    case 76: *value = 0; return OK;
    case 97: *value = 232448; return OK; // shared memory per block, opted in
    default: return INVALID;
    }
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = MEMORY; return device == 7 ? OK : 101; }
int cuDeviceGetPCIBusId(char *id, int len, int device) { snprintf(id, len, "0000:00:00.0"); return OK; }
int cuCtxPushCurrent_v2(void *context) { return context ? OK : INVALID; }
int cuCtxPopCurrent_v2(void **context) { *context = 0; return OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &primary; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { current = 0; return OK; }
int cuCtxSetCurrent(void *context) { current = context == &primary; return current ? OK : INVALID; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { NEEDS_CONTEXT; *free = MEMORY - used; *total = MEMORY; return OK; }
int cuMemAlloc_v2(address *pointer, size_t bytes) {
    NEEDS_CONTEXT; FORBIDDEN_IN_CAPTURE;
    if (!bytes) return INVALID;
    size_t rounded = (bytes + (2 << 20) - 1) >> 21 << 21;
    if (rounded > MEMORY - used) return NO_MEMORY;
    char *block = aligned_alloc(256, (bytes + 511) / 256 * 256);
    memset(block, 0xab, bytes + 256);
    *head(block + 256) = rounded;
    used += rounded;
    *pointer = (address)(block + 256);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 4096; i++)
        if (!blocks[i].bytes) { blocks[i].start = *pointer; blocks[i].bytes = bytes; break; }
    pthread_mutex_unlock(&lock);
    return OK;
}
int cuMemFree_v2(address pointer) {
    NEEDS_CONTEXT; FORBIDDEN_IN_CAPTURE;
    used -= *head((void *)pointer);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 4096; i++) if (blocks[i].start == pointer) blocks[i].start = blocks[i].bytes = 0;
    pthread_mutex_unlock(&lock);
    free((char *)pointer - 256);
    return OK;
}
int cuMemGetAddressRange_v2(address *start, size_t *bytes, address pointer) {
    NEEDS_CONTEXT;
    for (int i = 0; i < 4096; i++)
        if (pointer - blocks[i].start < blocks[i].bytes) { *start = blocks[i].start; *bytes = blocks[i].bytes; return OK; }
    return INVALID;
}
int cuPointerGetAttribute(void *value, unsigned attribute, address pointer) {
    address start; size_t bytes;
    if (cuMemGetAddressRange_v2(&start, &bytes, pointer)) return INVALID;
    *(int *)value = attribute == 2 ? 2 : 7; // device memory, of the one device
    return attribute == 2 || attribute == 9 ? OK : INVALID;
}
int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream) { NEEDS_CONTEXT; captured.launched++; memcpy((void *)to, (void *)from, bytes); return stream ? OK : INVALID; }
int cuDeviceGetDefaultMemPool(void **pool, int device) { *pool = &used; return OK; }
int cuMemPoolSetAttribute(void *pool, unsigned attribute, void *value) { return pool == &used && attribute == 4 ? OK : INVALID; }
int cuMemAllocAsync(address *pointer, size_t bytes, void *stream) { return cuMemAlloc_v2(pointer, bytes); }
int cuMemFreeAsync(address pointer, void *stream) { return cuMemFree_v2(pointer); }
int cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) { NEEDS_CONTEXT; *pointer = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); return OK; }
int cuMemFreeHost(void *pointer) { free(pointer); return OK; }
int cuMemsetD8Async(address at, unsigned char value, size_t count, void *stream) { NEEDS_CONTEXT; memset((void *)at, value, count); return stream ? OK : INVALID; }
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) { NEEDS_CONTEXT; memcpy((void *)to, from, bytes); return stream ? OK : INVALID; }
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) { NEEDS_CONTEXT; memcpy(to, (void *)from, bytes); return stream ? OK : INVALID; }
int cuStreamCreate(void **stream, unsigned flags) { NEEDS_CONTEXT; *stream = malloc(1); return flags == 1 ? OK : INVALID; }
int cuStreamDestroy_v2(void *stream) { free(stream); return OK; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { NEEDS_CONTEXT; return event && stream && !flags ? OK : INVALID; }
int cuStreamQuery(void *stream) { NEEDS_CONTEXT; FORBIDDEN_IN_CAPTURE; return !stream ? INVALID : unending && *unending ? 600 : OK; }
int cuStreamSynchronize(void *stream) { NEEDS_CONTEXT; FORBIDDEN_IN_CAPTURE; while (unending && *unending) usleep(1000); return stream ? OK : INVALID; }
int cuStreamBeginCapture_v2(void *stream, unsigned mode) { NEEDS_CONTEXT; FORBIDDEN_IN_CAPTURE; capturing = 1; captured.launched = captured.works = 0; return stream ? OK : INVALID; }
int cuStreamGetCaptureInfo_v2(void *stream, unsigned *status, unsigned long long *id, void **graph, void *const **nodes, size_t *count) { *nodes = 0; *count = 0; return capturing && stream ? OK : INVALID; }
int cuStreamUpdateCaptureDependencies(void *stream, void **nodes, size_t count, unsigned flags) { return capturing && stream && flags == 1 ? OK : INVALID; }
int cuStreamEndCapture(void *stream, void **graph) { if (!capturing) return INVALID; capturing = 0; *graph = memcpy(malloc(sizeof captured), &captured, sizeof captured); return OK; }
int cuGraphInstantiateWithFlags(void **exec, void *from, unsigned long long flags) {
    used += 65536;
    graph *made = *exec = memcpy(malloc(sizeof captured), from, sizeof captured);
    for (int i = 0; i < made->works; i++) made->list[i].hold(made->list[i].what);
    return OK;
}
#ifndef UPLOADED
#define UPLOADED OK
#endif
int cuGraphUpload(void *exec, void *stream) { return exec ? UPLOADED : INVALID; }
int cuGraphLaunch(void *exec, void *stream) {
    NEEDS_CONTEXT;
    graph *of = exec;
    for (int i = 0; i < of->works; i++) if (of->list[i].run(of->list[i].what)) return INVALID;
    return of->launched + of->works > 1 ? OK : INVALID;
}
int cuGraphExecDestroy(void *exec) {
    graph *of = exec;
    for (int i = 0; i < of->works; i++) of->list[i].release(of->list[i].what);
    used -= 65536;
    free(exec);
    return OK;
}
int cuGraphDestroy(void *graph) { free(graph); return OK; }
int cuModuleLoadData(void **module, const void *image) { NEEDS_CONTEXT; used += 1 << 20; *module = malloc(1); return memcmp(image, "\177ELF", 4) ? 200 : OK; }
int cuModuleUnload(void *module) { used -= 1 << 20; free(module); return OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return *name ? OK : INVALID; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return function && value >= 0 ? OK : INVALID; }
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **params, void **extra) {
    NEEDS_CONTEXT;
    captured.launched++;
    return function && stream && x && y && z && bx && bx <= 1024 && params[0] ? OK : INVALID;
}
int cuEventCreate(void **event, unsigned flags) { NEEDS_CONTEXT; *event = malloc(1); return OK; }
int cuEventDestroy_v2(void *event) { free(event); return OK; }
int cuEventRecordWithFlags(void *event, void *stream, unsigned flags) { NEEDS_CONTEXT; return event && stream && flags == 1 ? OK : INVALID; }
int cuEventRecord(void *event, void *stream) { NEEDS_CONTEXT; return event && stream ? OK : INVALID; }
int cuEventSynchronize(void *event) { NEEDS_CONTEXT; return event ? OK : INVALID; }
int cuEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 0.5f; return OK; }

// NVML, in the same library: the processes on the device are this one and another, which takes more each time that somebody looks.
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu, compute; } process;
int nvmlInitWithFlags(unsigned flags) { return flags ? 2 : OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return "not supported"; }
int nvmlSystemGetDriverVersion(char *version, unsigned length) { return 3; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = &used; return OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process *list) {
    static unsigned long long other;
    if (*count < 2) return 7;
    list[0] = (process){ getpid() + 1, other += 12345678 };
    list[1] = (process){ getpid(), used - TAKEN };
    *count = 2;
    return device ? OK : 2;
}
