/* Mapped files, brought into memory in their order; included by record_binding.c. */

#include <sys/mman.h>
#include <time.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* of Linux 5.14 */
#endif

enum { PIECE = 8 << 20, LOOKED_AT = 64 }; /* bytes that are brought at a time; pages that say whether any is missing */

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

#ifdef __linux__
/* Of files that this user may not write Linux says of all pages that they are there. */
static int is_missing(const char *data, size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (size + page - 1) / page;
    size_t step = pages < LOOKED_AT ? 1 : pages / LOOKED_AT;
    for (size_t at = 0; at < pages; at += step) {
        unsigned char there = 1;
        if (mincore((void *)(data + at * page), 1, &there) == 0 && !(there & 1)) return 1;
    }
    return 0;
}

/* Returns whether nothing is left to bring. Each piece is read and mapped at once, which disks do faster than anything else. */
static int bring_pieces(const char *data, size_t size, double seconds) {
    double end = now() + seconds;
    if (!is_missing(data, size)) return 1;
    for (size_t at = 0; at < size; at += PIECE) {
        if (now() > end) return 0;
        if (madvise((void *)(data + at), size - at < PIECE ? size - at : PIECE, MADV_POPULATE_READ) < 0) return 0;
    }
    return 1;
}
#else
static int bring_pieces(const char *data, size_t size, double seconds) {
    (void)data, (void)size, (void)seconds, (void)now;
    return 0;
}
#endif

static PyObject *bring(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer data;
    double seconds;
    if (!PyArg_ParseTuple(arguments, "y*d", &data, &seconds)) return NULL;
    int valid = (uintptr_t)data.buf % (uintptr_t)sysconf(_SC_PAGESIZE) == 0, is_there = 0;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        is_there = bring_pieces(data.buf, (size_t)data.len, seconds);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    if (valid) return PyBool_FromLong(is_there);
    PyErr_SetString(PyExc_ValueError, "expected memory that begins with a page, as a mapped file does");
    return NULL;
}
