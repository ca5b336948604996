/* Stands in for NVIDIA's management library, libnvidia-ml.so.1. The environment says what it tells:
 *   STAND_IN_DEVICES      UUIDs; none: the driver is not loaded
 *   STAND_IN_MEMORY       bytes of each device (default 1 GiB)
 *   STAND_IN_USED         bytes of them in use
 *   STAND_IN_PERSISTENCE  0 or 1; none: it does not tell
 *   STAND_IN_PROCESSES    pid:bytes,… (bytes -: it does not tell)
 *   STAND_IN_GRAPHICS     the same of processes that draw; none: it does not tell of them
 * A part of a GPU answers for itself about memory and processes, and else through the whole.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, NOT_LOADED = 9 };

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Process;

static int part, whole;
static const char *setting(const char *name, const char *otherwise) {
    const char *text = getenv(name);
    return text ? text : otherwise;
}

int nvmlInitWithFlags(unsigned flags) { return *setting("STAND_IN_DEVICES", "") ? OK : NOT_LOADED; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int status) { return "as the stand-in was told"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (!strstr(setting("STAND_IN_DEVICES", ""), uuid)) return NOT_FOUND;
    *device = strncmp(uuid, "MIG-", 4) ? &whole : &part;
    return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **out) {
    *out = &whole;
    return device == &part ? OK : NOT_FOUND;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *out) {
    out->total = strtoull(setting("STAND_IN_MEMORY", "1073741824"), 0, 0);
    out->used = strtoull(setting("STAND_IN_USED", "0"), 0, 0);
    out->free = out->total - out->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, Memory2 *out) {
    Memory found;
    nvmlDeviceGetMemoryInfo(device, &found);
    out->total = found.total, out->reserved = 0, out->free = found.free, out->used = found.used;
    return OK;
}
int nvmlDeviceGetPersistenceMode(void *device, unsigned *out) {
    *out = atoi(setting("STAND_IN_PERSISTENCE", "0"));
    return device == &whole && getenv("STAND_IN_PERSISTENCE") ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMinorNumber(void *device, unsigned *out) {
    *out = 5;
    return device == &whole ? OK : NOT_SUPPORTED;
}
static int processes(const char *list, unsigned *count, Process *out) {
    unsigned found = 0;
    char *copy = strdup(list), *rest = copy, *word;
    while ((word = strsep(&rest, ","))) {
        char *bytes = strchr(word, ':');
        if (!bytes) continue;
        if (out && found < *count)
            out[found] = (Process){atoi(word), bytes[1] == '-' ? -1ULL : strtoull(bytes + 1, 0, 0), 0, 0};
        found++;
    }
    free(copy);
    int fits = found <= *count;
    *count = found;
    return fits ? OK : INSUFFICIENT_SIZE;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *out) {
    return processes(setting("STAND_IN_PROCESSES", ""), count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, Process *out) {
    if (!getenv("STAND_IN_GRAPHICS")) return NOT_SUPPORTED;
    return processes(getenv("STAND_IN_GRAPHICS"), count, out);
}
