/* Preloaded into a process: one operation on one path fails once.
 * FAULT=OPERATION:PART_OF_THE_PATH:NUMBER:ERRNO, as in write:metrics.jsonl:2:28 - the second write to a file whose path
 * contains metrics.jsonl fails with ENOSPC. Operations: open (for writing), write, fsync, rename (to the path), mkdir, unlink.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int seen;

static int fails(const char *operation, const char *path)
{
    char wanted[32], part[256];
    int number, error;
    const char *fault = getenv("FAULT");
    if (!fault || !path || sscanf(fault, "%31[^:]:%255[^:]:%d:%d", wanted, part, &number, &error) != 4)
        return 0;
    if (strcmp(operation, wanted) || !strstr(path, part) || __sync_add_and_fetch(&seen, 1) != number)
        return 0;
    dprintf(2, "fault met: %s\n", fault);
    errno = error;
    return 1;
}

static const char *path_of(int descriptor, char *buffer, size_t size)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, buffer, size - 1);
    if (length < 0)
        return NULL;
    buffer[length] = 0;
    return buffer;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int opens_for_writing(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC); }

#define OPEN(name)                                                                   \
    int name(const char *path, int flags, ...)                                       \
    {                                                                                \
        va_list rest;                                                                \
        va_start(rest, flags);                                                       \
        mode_t mode = va_arg(rest, mode_t);                                          \
        va_end(rest);                                                                \
        if (opens_for_writing(flags) && fails("open", path)) return -1;              \
        return NEXT(name)(path, flags, mode);                                        \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                 \
    int name(int directory, const char *path, int flags, ...)                        \
    {                                                                                \
        va_list rest;                                                                \
        va_start(rest, flags);                                                       \
        mode_t mode = va_arg(rest, mode_t);                                          \
        va_end(rest);                                                                \
        if (opens_for_writing(flags) && fails("open", path)) return -1;              \
        return NEXT(name)(directory, path, flags, mode);                             \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int descriptor, const void *data, size_t size)
{
    char path[1024];
    if (descriptor > 2 && fails("write", path_of(descriptor, path, sizeof path)))
        return -1;
    return NEXT(write)(descriptor, data, size);
}

int fsync(int descriptor)
{
    char path[1024];
    if (fails("fsync", path_of(descriptor, path, sizeof path)))
        return -1;
    return NEXT(fsync)(descriptor);
}

int rename(const char *from, const char *to) { return fails("rename", to) ? -1 : NEXT(rename)(from, to); }

int mkdir(const char *path, mode_t mode) { return fails("mkdir", path) ? -1 : NEXT(mkdir)(path, mode); }

int unlink(const char *path) { return fails("unlink", path) ? -1 : NEXT(unlink)(path); }

int unlinkat(int directory, const char *path, int flags)
{
    return fails("unlink", path) ? -1 : NEXT(unlinkat)(directory, path, flags);
}
