/* What the bindings of transports do with the operations of Python (braidax.comm.transports.transport.Operation), and
 * what they have in common besides. */

#ifndef BRAIDAX_OPERATIONS_H
#define BRAIDAX_OPERATIONS_H

#include <stdint.h>
#include <time.h>

#include "arrays.h"

#define ROUNDS_PER_LOOK 32       /* at the clock */
#define ROUNDS_WHEN_CROWDED 4    /* the same where ranks are more than cores: another one has to run on this one */
#define LARGE_BYTES 32768        /* copying more than that is done without the GIL */
#define LARGE_PLACE_BYTES 131072 /* the same of a place for what comes: that of a request gets little most of the time */
#define LARGE_SECONDS 2e-3       /* of spinning at least, while a large message may be on its way: to wake costs more */
#define MAX_TURNS_AT_REST 100    /* of a core that spins, so that one it shares its units with copies faster */
#define TURNS_PER_SECOND 2e6     /* of spinning before them: a small part of it, as what is waited for may come meanwhile */
#define YIELD_SECONDS 5e-6       /* of spinning in vain, before others on this core are let in between */
#define MAX_FREE_REQUESTS 256
#define MAX_JOINED 8             /* buffers of a message of which a copy is sent */
#if defined(__x86_64__)
#define REST() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define REST() __asm__ __volatile__("yield")
#else
#define REST() ((void)0)
#endif

typedef struct { /* whoever waits for something that has no operation, unless there is more to tell, or it takes long */
    PyObject *operation;
    int is_over;
    size_t num_bytes; /* that came */
} Caller;

static PyObject *finish_name, *ready_name, *done_name, *num_bytes_name, *peer_name, *dtype_name, *shape_name;

static int make_names(void) {
    finish_name = PyUnicode_InternFromString("finish");
    ready_name = PyUnicode_InternFromString("ready");
    done_name = PyUnicode_InternFromString("done");
    num_bytes_name = PyUnicode_InternFromString("num_bytes");
    peer_name = PyUnicode_InternFromString("peer");
    dtype_name = PyUnicode_InternFromString("dtype");
    shape_name = PyUnicode_InternFromString("shape");
    int are_made = finish_name && ready_name && done_name && num_bytes_name && peer_name && dtype_name && shape_name;
    return are_made ? make_array_names() : -1;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Does what Operation.finish does, which costs a call of Python's, unless somebody wants to hear of the end. */
static int finish(PyObject *operation, size_t num_bytes) {
    PyObject *ready = PyObject_GetAttr(operation, ready_name), *number = NULL, *result = NULL;
    int failed = 0;
    if (ready && (ready != Py_None || num_bytes)) number = PyLong_FromSize_t(num_bytes);
    if (!ready || ((ready != Py_None || num_bytes) && !number)) {
        failed = -1;
    } else if (ready != Py_None) {
        result = PyObject_CallMethodObjArgs(operation, finish_name, number, NULL);
        failed = result ? 0 : -1;
    } else {
        if (number) failed = PyObject_SetAttr(operation, num_bytes_name, number);
        if (!failed) failed = PyObject_SetAttr(operation, done_name, Py_True);
    }
    Py_XDECREF(ready);
    Py_XDECREF(number);
    Py_XDECREF(result);
    return failed;
}

#endif
