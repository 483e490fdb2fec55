/* A libcuda.so.1 without a GPU: memory is malloc's, copies are made, launches are written down.

   fake_log() is what was called, a line each; fake_jobs() the parameters of all launches, as
   FAKE_PARAMETERS numbers of 8 bytes each. FAKE_VERSION, FAKE_DEVICES and FAKE_CAPABILITY change
   what the driver says of itself. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;

static char text[1 << 16];
static char jobs[1 << 16];
static size_t used, jobs_used;
static void *current;

static int number(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

static int say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    used += vsnprintf(text + used, sizeof text - used, format, arguments);
    va_end(arguments);
    used += snprintf(text + used, sizeof text - used, "\n");
    return 0;
}

const char *fake_log(void) { return text; }
const char *fake_jobs(void) { return jobs; }
void fake_forget(void) { used = jobs_used = 0; text[0] = 0; }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = number("FAKE_VERSION", 13000); return 0; }
int cuDeviceGetCount(int *count) { *count = number("FAKE_DEVICES", 2); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, size, "fake %d", device);
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    int capability = number("FAKE_CAPABILITY", 90);
    switch (attribute) {
    case 75: *value = capability / 10; break;
    case 76: *value = capability % 10; break;
    case 16: *value = 132; break;
    case 97: *value = 232448; break;
    case 82: *value = 65536; break;
    default: *value = 1 << 20;
    }
    return 0;
}

int cuGetErrorString(int status, const char **reason) { *reason = "so it is"; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(u64)(0x1000 + device);
    return 0;
}
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxPushCurrent_v2(void *context) { current = context; return say("push %p", context); }
int cuCtxPopCurrent_v2(void **context) { current = 0; return say("pop"); }

/* Where the memory of the next pointers lies. */
static int ordinal;
void fake_ordinal(int n) { ordinal = n; }
int cuPointerGetAttribute(int *value, int attribute, u64 address) { *value = ordinal; return 0; }

int cuModuleLoadData(void **module, const char *ptx) {
    *module = (void *)0x2000;
    return say("module %.7s", ptx);
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)0x3000;
    return say("function %s", name);
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
    return say("attribute %d %d", attribute, value);
}

int cuMemAllocAsync(u64 *address, size_t size, void *stream) {
    *address = (u64)aligned_alloc(256, (size + 255) / 256 * 256);
    return say("allocate %p", stream);
}
int cuMemFreeAsync(u64 address, void *stream) {
    free((void *)address);
    return say("free %p", stream);
}
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t size, void *stream) {
    memcpy((void *)to, from, size);
    return say("to device %zu %p", size, stream);
}
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t size, void *stream) {
    memcpy(to, (void *)from, size);
    return say("to host %zu %p", size, stream);
}
int cuStreamSynchronize(void *stream) { return say("synchronize %p", stream); }
int cuEventCreate(void **event, unsigned flags) { *event = (void *)0x4000; return 0; }
int cuEventRecord(void *event, void *stream) { return say("record %p", stream); }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return say("wait %p", stream); }
int cuEventDestroy_v2(void *event) { return 0; }

/* A map is its address here, and then nothing. */
int cuTensorMapEncodeTiled(u64 *map, int type, unsigned rank, u64 address, const u64 *sizes,
                           const u64 *strides, const unsigned *box, const unsigned *steps,
                           int interleave, int swizzle, int promotion, int fill) {
    if ((u64)map % 64 || rank != 4 || interleave || fill) return 1;
    map[0] = address;
    return say("map %d, %llu %llu %llu %llu, %llu %llu %llu, %u %u %u %u, %u %u %u %u, %d %d", type,
               sizes[0], sizes[1], sizes[2], sizes[3], strides[0], strides[1], strides[2], box[0],
               box[1], box[2], box[3], steps[0], steps[1], steps[2], steps[3], swizzle, promotion);
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **parameters, void **extra) {
    int count = number("FAKE_PARAMETERS", 0);
    for (int i = 0; i < count; i++, jobs_used += 8) memcpy(jobs + jobs_used, parameters[i], 8);
    if (number("FAKE_STATUS", 0)) return number("FAKE_STATUS", 0);
    if (getenv("FAKE_QUIET")) { used = jobs_used = 0; return 0; }
    return say("launch %u %u %u, %u %u %u, %u, %p", gx, gy, gz, bx, by, bz, shared, stream);
}

int cuMemsetD8Async(u64 address, unsigned char value, size_t size, void *stream) {
    memset((void *)address, value, size);
    return say("clear %zu %p", size, stream);
}
