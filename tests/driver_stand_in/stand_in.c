/* Stands in for the driver of a GPU, over memfds: CUDA's, and with -DHIP HIP's.
 *
 * It keeps the rules of the drivers as they are documented, and the nastier of what they leave open:
 * new memory holds rubbish, copies wait until somebody waits for them, and descriptors are not
 * close-on-exec. The layouts are those of the public headers cuda.h and hip_runtime_api.h.
 *
 * The environment says what it plays, at every call:
 *   STAND_IN_DEVICES      UUIDs with their prefix, comma separated; none: there is no device
 *   STAND_IN_MEMORY       bytes of each device (default 1 GiB)
 *   STAND_IN_GRANULARITY  bytes (default 2 MiB)
 *   STAND_IN_NO_VMM       set: no virtual memory management
 *   STAND_IN_NO_FDS       set: CUDA's has no memory behind descriptors
 *   STAND_IN_NO_REGISTER  set: host memory cannot be registered
 *   STAND_IN_FAIL         function:code[:nth],…: the nth call of a function, or every one, fails;
 *                         errors that end a context last until the variable changes
 *   STAND_IN_VERSION      of HIP's runtime (default 7.1)
 *   CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES  numbers, UUIDs or their beginnings; HIP reads the
 *                         first where the second is empty
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, OPERATING_SYSTEM = 304, INVALID_HANDLE = 400, ILLEGAL_STATE = 401,
    NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, REGISTERED = 712, NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801, UNKNOWN = 999
};

#define DEVICES 16
#define THINGS 8192

typedef struct { int kind, id; } Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} Properties;
typedef struct { Location location; int flags; } Access;
typedef struct { unsigned char bytes[16]; } Uuid;

/* One table of everything that is alive. */
enum kind { NONE, HANDLE, RESERVATION, MAPPING, QUEUE, PINNED, ALLOCATED };
typedef struct {
    enum kind kind;
    uintptr_t address;
    size_t size;
    int fd, access;
} Thing;
typedef struct {
    int queue;
    uintptr_t target, source;
    size_t width, height, pitch;
    int is_clear;
    unsigned value;
} Copy;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Thing things[THINGS];
static Copy *copies;
static size_t copy_count, copy_room;
static int contexts[DEVICES];
static __thread int stack[64], depth;

static const char *setting(const char *name, const char *otherwise) {
    const char *text = getenv(name);
    return text ? text : otherwise;
}
static size_t granularity(void) { return strtoull(setting("STAND_IN_GRANULARITY", "2097152"), 0, 0); }
static size_t memory(void) { return strtoull(setting("STAND_IN_MEMORY", "1073741824"), 0, 0); }

/* ---- devices ---- */

static int split(const char *list, char out[DEVICES][96]) {
    int count = 0;
    char *copy = strdup(list), *rest = copy, *word;
    while ((word = strsep(&rest, ",")) && count < DEVICES)
        if (*word) snprintf(out[count++], 96, "%s", word);
    free(copy);
    return count;
}

/* As the drivers: an entry that fits nothing hides itself and all after it. */
static int devices(char out[DEVICES][96]) {
    char all[DEVICES][96], wanted[DEVICES][96];
    int total = split(setting("STAND_IN_DEVICES", ""), all), count = 0;
#ifdef HIP
    /* HIP's own where it is not empty, else CUDA's; an empty one hides nothing. */
    const char *visible = setting("HIP_VISIBLE_DEVICES", "");
    if (!*visible) visible = setting("CUDA_VISIBLE_DEVICES", "");
    if (!*visible) visible = NULL;
#else
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
#endif
    if (!visible) {
        memcpy(out, all, sizeof all);
        return total;
    }
    int entries = split(visible, wanted);
    for (int i = 0; i < entries; i++) {
        char *end;
        long number = strtol(wanted[i], &end, 10);
        int found = *end ? -1 : (int)number;
        for (int j = 0; *end && j < total; j++)
            if (!strncmp(all[j], wanted[i], strlen(wanted[i]))) found = j;
        if (found < 0 || found >= total) break;
        strcpy(out[count++], all[found]);
    }
    return count;
}

static int uuid_of(int number, char out[96]) {
    char found[DEVICES][96];
    if (number < 0 || number >= devices(found)) return INVALID_DEVICE;
    strcpy(out, found[number]);
    return OK;
}

/* ---- failures ---- */

static int failure(const char *function) {
    static char before[256];
    static int ended, calls[8];
    const char *wanted = setting("STAND_IN_FAIL", "");
    if (strcmp(before, wanted)) {
        snprintf(before, sizeof before, "%s", wanted);
        memset(calls, 0, sizeof calls);
        ended = 0;
    }
    if (!*wanted || strstr(function, "GetError")) return OK;
    if (ended && !strstr(function, "Init")) return ended;
    char rules[DEVICES][96];
    int count = split(wanted, rules);
    for (int i = 0; i < count && i < 8; i++) {
        char name[96];
        int code = 0, nth = 0;
        if (sscanf(rules[i], "%95[^:]:%d:%d", name, &code, &nth) < 2 || strcmp(name, function)) continue;
        calls[i]++;
        if (nth && calls[i] != nth) continue;
        if (code == 214 || (code >= ILLEGAL_ADDRESS && code <= 719)) ended = code;
        return code;
    }
    return OK;
}

#define BEGIN                                       \
    pthread_mutex_lock(&lock);                      \
    int status = failure(__func__);                 \
    if (status) goto end
#define BEGIN_IN_CONTEXT                            \
    BEGIN;                                          \
    if (current() < 0) FAIL(INVALID_CONTEXT)
#define FAIL(code) do { status = (code); goto end; } while (0)
#define REQUIRE(condition, code) do { if (!(condition)) FAIL(code); } while (0)
#define END end: pthread_mutex_unlock(&lock); return status

/* ---- things ---- */

static Thing *add(enum kind kind, uintptr_t address, size_t size, int fd) {
    for (int i = 1; i < THINGS; i++)
        if (things[i].kind == NONE) {
            things[i] = (Thing){kind, address, size, fd, 0};
            return &things[i];
        }
    abort();
}
static Thing *numbered(enum kind kind, uint64_t number) {
    return number > 0 && number < THINGS && things[number].kind == kind ? &things[number] : 0;
}
static Thing *at(enum kind kind, uintptr_t address) {
    for (int i = 1; i < THINGS; i++)
        if (things[i].kind == kind && things[i].address == address) return &things[i];
    return 0;
}
static Thing *around(enum kind kind, uintptr_t address, size_t size) {
    for (int i = 1; i < THINGS; i++)
        if (things[i].kind == kind && address >= things[i].address
            && address + size <= things[i].address + things[i].size) return &things[i];
    return 0;
}
static int touches(enum kind kind, uintptr_t address, size_t size) {
    for (int i = 1; i < THINGS; i++)
        if (things[i].kind == kind && address < things[i].address + things[i].size
            && things[i].address < address + size) return 1;
    return 0;
}
static void forget(Thing *thing) {
    if (thing->fd >= 0) close(thing->fd);
    thing->kind = NONE;
}

/* How many things are alive in this process; for tests. */
int stand_in_alive(void) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (int i = 1; i < THINGS; i++) count += things[i].kind != NONE;
    for (int i = 0; i < DEVICES; i++) count += contexts[i];
    pthread_mutex_unlock(&lock);
    return count;
}

/* Forget everything, as the end of the process would; for tests that lose a device. */
void stand_in_end(void) {
    pthread_mutex_lock(&lock);
    for (int i = 1; i < THINGS; i++) {
        if (things[i].kind == RESERVATION) munmap((void *)things[i].address, things[i].size);
        if (things[i].kind != NONE) forget(&things[i]);
    }
    memset(contexts, 0, sizeof contexts);
    copy_count = 0;
    pthread_mutex_unlock(&lock);
}

/* ---- memory: what any process has open or mapped is in use ---- */

typedef struct { char mark[128]; ino_t seen[THINGS]; int count; size_t sum; } Usage;

static void note(Usage *usage, ino_t inode, size_t size) {
    for (int i = 0; i < usage->count; i++)
        if (usage->seen[i] == inode) return;
    if (usage->count < THINGS) usage->seen[usage->count++] = inode, usage->sum += size;
}

static void note_open(Usage *usage, const char *folder) {
    DIR *dir = opendir(folder);
    struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        char path[600], link[256];
        struct stat found;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        ssize_t length = readlink(path, link, sizeof link - 1);
        if (length < 0) continue;
        link[length] = 0;
        if (strstr(link, usage->mark) && !stat(path, &found)) note(usage, found.st_ino, found.st_size);
    }
    if (dir) closedir(dir);
}

static void note_mapped(Usage *usage, const char *maps) {
    FILE *file = fopen(maps, "r");
    char line[512];
    unsigned long from, to, inode;
    while (file && fgets(line, sizeof line, file))
        if (strstr(line, usage->mark) && sscanf(line, "%lx-%lx %*s %*s %*s %lu", &from, &to, &inode) == 3)
            note(usage, inode, to - from);
    if (file) fclose(file);
}

static size_t used(const char *uuid) {
    static Usage usage;
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    usage.count = usage.sum = 0;
    snprintf(usage.mark, sizeof usage.mark, "/memfd:stand-in:%s", uuid);
    for (int mapped = 0; proc && mapped < 2; mapped++) {
        rewinddir(proc);
        while ((entry = readdir(proc))) {
            char path[300];
            if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
            snprintf(path, sizeof path, "/proc/%s/%s", entry->d_name, mapped ? "maps" : "fd");
            mapped ? note_mapped(&usage, path) : note_open(&usage, path);
        }
    }
    if (proc) closedir(proc);
    return usage.sum;
}

static int create(uint64_t *handle, size_t size, const Properties *properties) {
    char uuid[96], name[128];
    if (getenv("STAND_IN_NO_VMM")) return NOT_SUPPORTED;
    if (properties->type != 1 || properties->location.kind != 1) return INVALID_VALUE;
    if (!size || size % granularity()) return INVALID_VALUE;
    if (uuid_of(properties->location.id, uuid)) return INVALID_DEVICE;
    if (used(uuid) + size > memory()) return OUT_OF_MEMORY;
    snprintf(name, sizeof name, "stand-in:%s", uuid);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return OPERATING_SYSTEM;
    unsigned char *rubbish = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (rubbish == MAP_FAILED) return OPERATING_SYSTEM;
    memset(rubbish, 0xa5, size);
    munmap(rubbish, size);
    Thing *thing = add(HANDLE, 0, size, fd);
    thing->access = properties->handle_types;
    *handle = thing - things;
    return OK;
}

static int export_handle(int *out, uint64_t handle, int type) {
    Thing *thing = numbered(HANDLE, handle);
    if (!thing) return INVALID_HANDLE;
    if (type != 1 || !(thing->access & 1)) return INVALID_VALUE;
    int fd = dup(thing->fd);
    if (fd < 0) return OPERATING_SYSTEM;
    *out = fd;
    return OK;
}

static int import_handle(uint64_t *handle, int fd, int type) {
    char path[64], link[256];
    struct stat found;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(path, link, sizeof link - 1);
    if (type != 1 || length < 0) return INVALID_VALUE;
    link[length] = 0;
    if (strncmp(link, "/memfd:stand-in:", 16)) return UNKNOWN; // as driver 580 does
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0 || fstat(own, &found)) return OPERATING_SYSTEM;
    *handle = add(HANDLE, 0, found.st_size, own) - things;
    return OK;
}

#ifndef HIP
/* The number of the device that the memory is on; -1 if this process does not see it. */
static int home_of(Thing *thing) {
    char path[64], link[256], found[DEVICES][96];
    snprintf(path, sizeof path, "/proc/self/fd/%d", thing->fd);
    ssize_t length = readlink(path, link, sizeof link - 1);
    if (length < 0) return -1;
    link[length] = 0;
    for (int i = devices(found) - 1; i >= 0; i--)
        if (strstr(link, found[i])) return i;
    return -1;
}
#endif

static int release(uint64_t handle) {
    Thing *thing = numbered(HANDLE, handle);
    if (!thing) return INVALID_HANDLE;
    forget(thing);
    return OK;
}

static int reserve(uintptr_t *out, size_t size) {
    size_t unit = granularity();
    if (!size || size % unit) return INVALID_VALUE;
    char *area = mmap(0, size + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED) return OUT_OF_MEMORY;
    uintptr_t start = ((uintptr_t)area + unit - 1) / unit * unit;
    if (start != (uintptr_t)area) munmap(area, start - (uintptr_t)area);
    munmap((void *)(start + size), (uintptr_t)area + unit - start);
    add(RESERVATION, start, size, -1);
    *out = start;
    return OK;
}

static int free_range(uintptr_t address, size_t size) {
    Thing *thing = at(RESERVATION, address);
    if (!thing || thing->size != size || touches(MAPPING, address, size)) return INVALID_VALUE;
    munmap((void *)address, size);
    forget(thing);
    return OK;
}

static int map(uintptr_t address, size_t size, size_t offset, uint64_t handle) {
    Thing *thing = numbered(HANDLE, handle);
    if (!thing) return INVALID_HANDLE;
    if (offset || !size || size % granularity() || address % granularity() || size > thing->size) return INVALID_VALUE;
    if (!around(RESERVATION, address, size) || touches(MAPPING, address, size)) return INVALID_VALUE;
    if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, thing->fd, 0) == MAP_FAILED) return OPERATING_SYSTEM;
    add(MAPPING, address, size, -1);
    return OK;
}

static int unmap(uintptr_t address, size_t size) {
    Thing *thing = at(MAPPING, address);
    if (!thing || thing->size != size) return INVALID_VALUE;
    for (size_t i = 0; i < copy_count; i++)
        if (copies[i].target >= address && copies[i].target < address + size) return ILLEGAL_STATE;
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    forget(thing);
    return OK;
}

static int allow(uintptr_t address, size_t size, const Access *access, size_t count) {
    char uuid[96];
    size_t covered = 0;
    for (size_t i = 0; i < count; i++)
        if (access[i].location.kind != 1 || uuid_of(access[i].location.id, uuid)) return INVALID_DEVICE;
    if (count != 1) return INVALID_VALUE;
    for (int i = 1; i < THINGS; i++)
        if (things[i].kind == MAPPING && things[i].address >= address
            && things[i].address + things[i].size <= address + size) covered += things[i].size;
    if (!size || covered != size) return INVALID_VALUE;
    int protection = access->flags == 3 ? PROT_READ | PROT_WRITE : access->flags == 1 ? PROT_READ : PROT_NONE;
    if (mprotect((void *)address, size, protection)) return OPERATING_SYSTEM;
    for (int i = 1; i < THINGS; i++)
        if (things[i].kind == MAPPING && things[i].address >= address
            && things[i].address + things[i].size <= address + size) things[i].access = access->flags;
    return OK;
}

/* ---- host memory and copies ---- */

static int pin(uintptr_t address, size_t size) {
    if (getenv("STAND_IN_NO_REGISTER")) return NOT_SUPPORTED;
    if (!size || touches(PINNED, address, size)) return REGISTERED;
    add(PINNED, address, size, -1);
    return OK;
}
static int in_use(Thing *thing) {
    for (size_t i = 0; i < copy_count; i++)
        if (!copies[i].is_clear && copies[i].source >= thing->address
            && copies[i].source < thing->address + thing->size) return 1;
    return 0;
}
static int unpin(uintptr_t address) {
    Thing *thing = at(PINNED, address);
    if (!thing) return NOT_REGISTERED;
    if (in_use(thing)) return ILLEGAL_STATE;
    forget(thing);
    return OK;
}
#ifndef HIP
static int allocate(uintptr_t *out, size_t size) {
    void *area = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (area == MAP_FAILED) return OUT_OF_MEMORY;
    *out = add(ALLOCATED, (uintptr_t)area, size, -1)->address;
    return OK;
}
static int free_allocated(uintptr_t address) {
    Thing *thing = at(ALLOCATED, address);
    if (!thing) return INVALID_VALUE;
    if (in_use(thing)) return ILLEGAL_STATE;
    munmap((void *)address, thing->size);
    forget(thing);
    return OK;
}
#endif

static int queue_up(Copy copy) {
    if (copy.queue && !numbered(QUEUE, copy.queue)) return INVALID_HANDLE;
    size_t span = copy.is_clear ? 0 : copy.pitch * (copy.height - 1) + copy.width;
    if (!copy.is_clear && !around(PINNED, copy.source, span) && !around(ALLOCATED, copy.source, span)) return INVALID_VALUE;
    if (!copy.is_clear && copy.height > 1 && copy.pitch < copy.width) return INVALID_VALUE;
    if (copy_count == copy_room) copies = realloc(copies, sizeof *copies * (copy_room = 2 * copy_room + 64));
    copies[copy_count++] = copy;
    return OK;
}
static int accessible(uintptr_t address, size_t size, int flags) {
    while (size) {
        Thing *thing = 0;
        for (int i = 1; i < THINGS && !thing; i++)
            if (things[i].kind == MAPPING && address >= things[i].address
                && address < things[i].address + things[i].size) thing = &things[i];
        if (!thing || (thing->access & flags) != flags) return 0;
        size_t here = thing->address + thing->size - address;
        if (here > size) here = size;
        address += here, size -= here;
    }
    return 1;
}
static int carry_out(int queue, int all) {
    size_t kept = 0;
    int status = OK;
    for (size_t i = 0; i < copy_count; i++) {
        Copy copy = copies[i];
        if (!all && copy.queue != queue) {
            copies[kept++] = copy;
            continue;
        }
        if (!accessible(copy.target, copy.width * copy.height, 3)) {
            status = ILLEGAL_ADDRESS;
        } else if (copy.is_clear) {
            for (size_t n = 0; n < copy.width / 4; n++) ((unsigned *)copy.target)[n] = copy.value;
        } else {
            for (size_t row = 0; row < copy.height; row++)
                memcpy((char *)copy.target + row * copy.width, (char *)copy.source + row * copy.pitch, copy.width);
        }
    }
    copy_count = kept;
    return status;
}
static int copy_out(void *target, uintptr_t source, size_t size) {
    int status = carry_out(0, 0);
    if (status) return status;
    if (!accessible(source, size, 1)) return ILLEGAL_ADDRESS;
    memcpy(target, (void *)source, size);
    return OK;
}
static int open_queue(uint64_t *out) {
    *out = add(QUEUE, 0, 0, -1) - things;
    return OK;
}
static int close_queue(uint64_t queue) {
    Thing *thing = numbered(QUEUE, queue);
    if (!thing) return INVALID_HANDLE;
    int status = carry_out(queue, 0);
    forget(thing);
    return status;
}

static const char *name_of(int status) {
    switch (status) {
    case OK: return "SUCCESS";
    case INVALID_VALUE: return "INVALID_VALUE";
    case OUT_OF_MEMORY: return "OUT_OF_MEMORY";
    case NO_DEVICE: return "NO_DEVICE";
    case INVALID_DEVICE: return "INVALID_DEVICE";
    case INVALID_CONTEXT: return "INVALID_CONTEXT";
    case 214: return "ECC_UNCORRECTABLE";
    case OPERATING_SYSTEM: return "OPERATING_SYSTEM";
    case INVALID_HANDLE: return "INVALID_HANDLE";
    case ILLEGAL_STATE: return "ILLEGAL_STATE";
    case ILLEGAL_ADDRESS: return "ILLEGAL_ADDRESS";
    case NOT_SUPPORTED: return "NOT_SUPPORTED";
    default: return "STATUS";
    }
}

#ifdef HIP
#include "hip.inc"
#else
#include "cuda.inc"
#endif
