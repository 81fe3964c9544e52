/* Mapped files, brought into memory in their order; included by record_binding.c. */

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* of Linux 5.14 */
#endif

enum { PIECE = 2 << 20, THREADS = 4 }; /* bytes that are brought at a time, and who does so */
enum { LOOKED_AT = 64 };                /* pages that say whether any is missing */

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

typedef struct {
    const char *data;
    size_t size, next; /* the piece that nobody has taken */
    double end;
    int is_left; /* whether some of them stay where they are */
} pieces;

/* Reads a byte of each page. On a virtual machine, whose host maps what the disk has written when it is first read, this
 * takes long; here it does so while the disk reads for others. */
static void touch_pages(const char *data, size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t at = 0; at < size; at += page) (void)*(volatile const char *)(data + at);
}

/* Takes one piece after the other until none is left. Each is read and mapped at once. */
static void *bring_some(void *given) {
    pieces *all = given;
    for (;;) {
        size_t at = __atomic_fetch_add(&all->next, PIECE, __ATOMIC_RELAXED);
        if (at >= all->size) return NULL;
        size_t size = all->size - at < PIECE ? all->size - at : PIECE;
        if (now() <= all->end && madvise((void *)(all->data + at), size, MADV_POPULATE_READ) == 0) {
            touch_pages(all->data + at, size);
            continue;
        }
        __atomic_store_n(&all->is_left, 1, __ATOMIC_RELAXED);
        return NULL;
    }
}

/* Returns whether nothing is left to bring. Several threads do it: while one maps and touches what has come, the disk reads
 * for the others. */
static int bring_pieces(const char *data, size_t size, double seconds) {
    pieces all = {.data = data, .size = size, .end = now() + seconds};
    if (!is_missing(data, size)) return 1;
    sigset_t none, before;
    sigfillset(&none);
    pthread_sigmask(SIG_BLOCK, &none, &before); /* signals are for threads of Python */
    pthread_t others[THREADS - 1];
    int num_others = 0;
    while (num_others < THREADS - 1 && (size_t)num_others < (size - 1) / PIECE &&
           pthread_create(&others[num_others], NULL, bring_some, &all) == 0)
        num_others++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    bring_some(&all);
    while (num_others) pthread_join(others[--num_others], NULL);
    return !all.is_left;
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
