/* The schedules of collectives (braidax.comm.collectives.schedule says what their steps are); runs.h runs them. */

#ifndef BRAIDAX_SCHEDULES_H
#define BRAIDAX_SCHEDULES_H

#include <stdlib.h>

#include "reductions.h"

#define HEAD_BYTES 128       /* of what a member brings, before the first message to another one */
#define SCRATCH_ALIGNMENT 64
#define NUM_PLACES 3

typedef enum { SEND, RECEIVE, WAIT, REDUCE, COPY, NUM_KINDS } Kind;
typedef enum { OWN, OUT, SCRATCH } Place;

typedef struct {
    int64_t place, begin;
} Position;

typedef struct { /* a row of int64; see Schedule.rows */
    int64_t kind, peer, ticket, num_bytes, capacity;
    Position to, first, second;
} Step;

typedef struct {
    PyObject_HEAD
    Step *steps;
    size_t num_steps, num_tickets;
    int64_t sizes[NUM_PLACES], max_peer;
    const NamedReduction *reduction;
} Schedule;

typedef struct Run Run;

typedef struct { /* a message of a run: of a send or receive step */
    Run *run;         /* that it belongs to; NULL for what Python sends and receives */
    const Step *step; /* of that run */
    unsigned peer;
    int is_send, has_ended;
    int status; /* 0: it has ended well */
    size_t num_bytes;
} Ticket;

typedef struct { /* the runs of a worker, and what they need of it */
    uint64_t rank;
    unsigned num_peers;
    PyObject *disagreed, *operation_type;
    Run *running, *over, *left_over; /* the last ones have failed, and a peer may know their memory still */
    size_t num_large;                /* messages and runs whose copies take time */
    Run *spare;                      /* memory of a run that is over, for the next one */
    void *spare_scratch;             /* the same of scratch memory, and its bytes */
    size_t spare_bytes;
} Runs;

static PyTypeObject *schedule_type;

/* Schedules */

static int fits(const Schedule *self, const Position *position, int64_t num_bytes) {
    return position->place >= 0 && position->place < NUM_PLACES && position->begin >= 0 && num_bytes >= 0 &&
           num_bytes <= self->sizes[position->place] && position->begin <= self->sizes[position->place] - num_bytes;
}

/* Whether a step is one that can be run, after those before it; `posted` says which tickets there are. */
static int is_valid(const Schedule *self, const Step *step, char *posted) {
    int64_t element = self->reduction ? (int64_t)self->reduction->num_bytes : 0;
    switch (step->kind) {
    case SEND:
    case RECEIVE:
        if (step->ticket < 0 || step->ticket >= (int64_t)self->num_tickets || posted[step->ticket]) return 0;
        posted[step->ticket] = 1;
        if (step->peer < 0 || step->peer > INT32_MAX || step->num_bytes < 0) return 0;
        if (step->kind == SEND) return fits(self, &step->to, step->num_bytes);
        return step->to.place != OWN && fits(self, &step->to, step->capacity ? step->capacity : step->num_bytes) &&
               (!step->capacity || step->capacity - HEAD_BYTES >= step->num_bytes);
    case WAIT: return step->ticket >= 0 && step->ticket < (int64_t)self->num_tickets && posted[step->ticket];
    case REDUCE:
        if (!element || step->num_bytes % element || !fits(self, &step->second, step->num_bytes)) return 0;
        /* fall through */
    case COPY: return step->to.place != OWN && fits(self, &step->to, step->num_bytes) && fits(self, &step->first, step->num_bytes);
    default: return 0;
    }
}

static PyObject *schedule_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    Py_buffer rows;
    long long own, out, scratch, num_tickets;
    const char *operation, *dtype;
    if (keywords && PyDict_Size(keywords)) return PyErr_SetString(PyExc_TypeError, "no keywords"), NULL;
    if (!PyArg_ParseTuple(arguments, "y*(LLL)Lss", &rows, &own, &out, &scratch, &num_tickets, &operation, &dtype)) return NULL;
    Schedule *self = (Schedule *)PyType_GenericAlloc(type, 0);
    char *posted = num_tickets < 0 ? NULL : calloc((size_t)num_tickets + 1, 1);
    if (!self || !posted || (size_t)rows.len % sizeof(Step)) {
        if (self) PyErr_SetString(PyExc_ValueError, "no schedule");
        goto failed;
    }
    self->num_steps = (size_t)rows.len / sizeof(Step);
    self->num_tickets = (size_t)num_tickets;
    self->sizes[OWN] = own, self->sizes[OUT] = out, self->sizes[SCRATCH] = scratch;
    self->reduction = reduction_of(operation, dtype);
    if (*operation && !self->reduction) {
        PyErr_Format(PyExc_LookupError, "no loop for %s of %s", operation, dtype);
        goto failed;
    }
    if (!(self->steps = malloc((size_t)rows.len + 1))) {
        PyErr_NoMemory();
        goto failed;
    }
    memcpy(self->steps, rows.buf, (size_t)rows.len);
    for (size_t i = 0; i < self->num_steps; i++) {
        if (self->steps[i].kind <= RECEIVE && self->steps[i].peer > self->max_peer) self->max_peer = self->steps[i].peer;
        if (is_valid(self, &self->steps[i], posted)) continue;
        PyErr_Format(PyExc_ValueError, "step %zu cannot be run", i);
        goto failed;
    }
    free(posted);
    PyBuffer_Release(&rows);
    return (PyObject *)self;
failed:
    free(posted);
    PyBuffer_Release(&rows);
    Py_XDECREF((PyObject *)self);
    return NULL;
}

static void schedule_dealloc(Schedule *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    free(self->steps);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static PyType_Slot schedule_slots[] = {
    {Py_tp_new, schedule_new},
    {Py_tp_dealloc, schedule_dealloc},
    {0, NULL},
};

static PyType_Spec schedule_spec = {
    .name = "braidax.comm.transports." BINDING ".Schedule",
    .basicsize = sizeof(Schedule),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = schedule_slots,
};

#endif
