/* Runs the schedules of collectives (braidax.comm.collectives.schedule says what their steps are), without the GIL.
 *
 * A run belongs to a worker. Whoever makes the worker progress goes on with its runs, as far as what they wait for has
 * ended. Part of ucx_binding.c, which says what requests and workers are. */

#ifndef BRAIDAX_UCX_SCHEDULES_H
#define BRAIDAX_UCX_SCHEDULES_H

#include "reductions.h"

#define HEAD_BYTES 128       /* of what a member brings, before the first message to another one */
#define SCRATCH_ALIGNMENT 64
#define NUM_PLACES 3
#define RUN_SECONDS 1e-3     /* of spinning at least, with others let in between: to wake costs more than most runs */

typedef enum { SEND, RECEIVE, WAIT, REDUCE, COPY, NUM_KINDS } Kind;
typedef enum { OWN, OUT, SCRATCH } Place;

typedef struct {
    int64_t place, begin;
} Position;

struct Step { /* a row of int64; see Schedule.rows */
    int64_t kind, peer, ticket, num_bytes, capacity;
    Position to, first, second;
};

typedef struct {
    PyObject_HEAD
    Step *steps;
    size_t num_steps, num_tickets;
    int64_t sizes[NUM_PLACES], max_peer;
    const NamedReduction *reduction;
} Schedule;

typedef struct { /* whoever waits for a run, without an operation unless that fails or takes long */
    PyObject *operation;
    int is_over;
} Caller;

struct Run {
    Run *next;
    Worker *worker;
    PyObject *operation, *schedule_object, *head_object;
    Schedule *schedule;
    const char *head;
    Py_buffer own, out;
    char *places[NUM_PLACES], *scratch;
    uint64_t tag;
    size_t position;   /* of the step that is next */
    size_t num_open;   /* requests that UCX has not ended */
    Request *failed;   /* the first request that has */
    int is_large, is_told;
    Caller *caller;     /* that waits for it; there is no operation as long as one does */
    unsigned waits_for; /* the peer that Python was told of last */
    ucp_dt_iov_t *parts; /* two for each request */
    Request requests[];  /* one for each ticket */
};

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
    .name = "braidax.comm.transports.ucx_binding.Schedule",
    .basicsize = sizeof(Schedule),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = schedule_slots,
};

/* Runs: the GIL may not be held, but where it is said */

static char *at(const Run *run, const Position *position) { return run->places[position->place] + position->begin; }

static void post(Worker *self, Run *run, const Step *step) {
    Request *request = &run->requests[step->ticket];
    Peer *peer = &self->peers[step->peer];
    request->peer = (unsigned)step->peer;
    request->is_send = step->kind == SEND;
    request->is_large = step->num_bytes > LARGE_BYTES;
    run->num_open++;
    link_pending(self, request);
    ucp_request_param_t param;
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                         UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.user_data = request;
    param.datatype = UCP_DATATYPE_CONTIG_BYTE;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    ucs_status_ptr_t handle = (ucs_status_ptr_t)(intptr_t)peer->status;
    if (request->is_send) {
        const void *data = at(run, &step->to);
        size_t size = (size_t)step->num_bytes;
        if (step->capacity && !size) {
            data = run->head, size = HEAD_BYTES;
        } else if (step->capacity) {
            ucp_dt_iov_t *parts = &run->parts[2 * step->ticket];
            parts[0] = (ucp_dt_iov_t){(void *)run->head, HEAD_BYTES};
            parts[1] = (ucp_dt_iov_t){(void *)data, size};
            data = parts, size = 2, param.datatype = UCP_DATATYPE_IOV;
        }
        param.cb.send = on_sent;
        if (!peer->is_lost)
            handle = ucp_tag_send_nbx(peer->endpoint, data, size, self->rank << TAG_BITS | run->tag, &param);
    } else {
        param.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
        param.cb.recv = on_received;
        handle = ucp_tag_recv_nbx(self->worker, at(run, &step->to), (size_t)(step->capacity ? step->capacity : step->num_bytes),
                                  (uint64_t)step->peer << TAG_BITS | run->tag, UINT64_MAX, &param);
        if (peer->is_lost) self->has_newly_lost = 1;
    }
    if (request->has_ended) return; /* its callback was called at once */
    if (handle && !is_error(handle)) request->handle = handle;
    else ended(request, handle ? error_of(handle) : UCS_OK);
}

/* Whether what a request has received is a message, and fits; an ended receive is looked at once. */
static int has_come(Worker *self, Run *run, const Step *step) {
    Request *request = &run->requests[step->ticket];
    if (request->is_send) return 1;
    if (request->is_unchecked) {
        look(self);
        check(self, request);
    }
    if (request->status != UCS_OK) return 0;
    const Step *posted = request->step;
    if (posted->capacity && (request->num_bytes < HEAD_BYTES || memcmp(at(run, &posted->to), run->head, HEAD_BYTES))) return 0;
    return request->num_bytes == (size_t)posted->num_bytes + (posted->capacity ? HEAD_BYTES : 0);
}

static void end_of_run(Request *request) {
    Run *run = request->run;
    run->num_open--;
    if (request->status != UCS_OK && !run->failed) run->failed = request;
}

/* Goes on with a run; returns whether it is over. */
static int advance(Worker *self, Run *run) {
    const Schedule *schedule = run->schedule;
    for (; run->position < schedule->num_steps && !run->failed; run->position++) {
        const Step *step = &schedule->steps[run->position];
        switch (step->kind) {
        case SEND:
        case RECEIVE:
            run->requests[step->ticket].step = step;
            post(self, run, step);
            break;
        case WAIT:
            if (!run->requests[step->ticket].has_ended) return 0;
            if (!has_come(self, run, step)) run->failed = &run->requests[step->ticket];
            break;
        case REDUCE:
            schedule->reduction->reduce(at(run, &step->to), at(run, &step->first), at(run, &step->second), (size_t)step->num_bytes);
            break;
        case COPY: memmove(at(run, &step->to), at(run, &step->first), (size_t)step->num_bytes); break;
        }
    }
    return 1;
}

static int can_go_on(const Run *run) {
    return run->failed || run->position >= run->schedule->num_steps ||
           run->schedule->steps[run->position].kind != WAIT ||
           run->requests[run->schedule->steps[run->position].ticket].has_ended;
}

static void advance_all(Worker *self) {
    Run *run;
    for (Run **link = &self->running; (run = *link);) {
        if (can_go_on(run) && advance(self, run)) {
            *link = run->next;
            run->next = self->over;
            self->over = run;
        } else {
            link = &run->next;
        }
    }
}

/* Runs: with the GIL */

static void free_run(Run *run) {
    if (run->own.obj) PyBuffer_Release(&run->own);
    if (run->out.obj) PyBuffer_Release(&run->out);
    Py_XDECREF(run->operation);
    Py_XDECREF(run->schedule_object);
    Py_XDECREF(run->head_object);
    free(run->scratch);
    free(run);
}

static void free_runs(Run **list) {
    for (Run *run; (run = *list);) {
        *list = run->next;
        int is_kept = 0;
        for (size_t i = 0; i < run->schedule->num_tickets; i++) is_kept |= run->requests[i].is_kept;
        if (!is_kept) free_run(run); /* else a peer may read its memory still */
    }
}

/* What went wrong first: a member that brings something else explains whatever else came of it. */
static Request *cause_of(Run *run) {
    for (size_t i = 0; i < run->schedule->num_tickets; i++) {
        Request *request = &run->requests[i];
        if (request->step && request->has_ended && !request->is_send && request->step->capacity &&
            request->num_bytes >= HEAD_BYTES && request->status == UCS_OK &&
            memcmp(at(run, &request->step->to), run->head, HEAD_BYTES))
            return request;
    }
    return run->failed;
}

/* Makes the operation of a run that began without one. */
static int make_operation(Worker *self, Run *run, Caller *caller) {
    run->operation = PyObject_CallFunction(self->operation_type, "K", (unsigned long long)self->rank);
    run->caller = NULL;
    caller->operation = run->operation;
    Py_XINCREF(caller->operation);
    return run->operation ? 0 : -1;
}

static int tell_failed(Worker *self, Run *run) {
    Request *request = cause_of(run);
    const Step *step = request->step;
    PyObject *result;
    if (request->status != UCS_OK) {
        Peer *peer = &self->peers[request->peer];
        if (!peer->is_lost && is_loss(request->status)) lose(self, peer, request->status);
        result = PyObject_CallFunction(self->failed, "OIsOnn", run->operation, request->peer,
                                       ucs_status_string(request->status), peer->is_lost ? Py_True : Py_False,
                                       (Py_ssize_t)request->num_bytes,
                                       (Py_ssize_t)(step->capacity ? step->capacity : step->num_bytes));
    } else {
        const char *theirs = step->capacity ? at(run, &step->to) : "";
        Py_ssize_t num_bytes = step->capacity ? (Py_ssize_t)request->num_bytes : 0;
        result = PyObject_CallFunction(self->disagreed, "OIy#y#nn", run->operation, request->peer, theirs,
                                       num_bytes < HEAD_BYTES ? num_bytes : HEAD_BYTES, run->head, (Py_ssize_t)HEAD_BYTES,
                                       (Py_ssize_t)request->num_bytes,
                                       (Py_ssize_t)step->num_bytes + (step->capacity ? HEAD_BYTES : 0));
    }
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static int tell_end(Worker *self, Run *run) {
    Caller *caller = run->caller;
    if (caller) {
        caller->is_over = 1;
        if (!run->failed) return 0;
        if (make_operation(self, run, caller) < 0) return -1;
    }
    if (!run->operation) return 0; /* its caller has been told of something worse */
    return run->failed ? tell_failed(self, run) : finish(run->operation, 0);
}

/* Tells Python of the runs that are over. */
static int tell_over(Worker *self) {
    for (Run *run; (run = self->over);) {
        self->over = run->next;
        self->num_large -= (size_t)run->is_large;
        int failed = tell_end(self, run);
        if (run->num_open) { /* it has failed: its memory stays until the worker closes */
            run->next = self->left_over;
            self->left_over = run;
        } else {
            free_run(run);
        }
        if (failed) return -1;
    }
    return 0;
}

/* Says whom the runs wait for, which errors of waits name. */
static int tell_waiting(Worker *self) {
    for (Run *run = self->running; run; run = run->next) {
        const Step *step = &run->schedule->steps[run->position];
        if (run->position >= run->schedule->num_steps || step->kind != WAIT) continue;
        unsigned peer = run->requests[step->ticket].peer;
        if (!run->operation || (run->is_told && run->waits_for == peer)) continue;
        PyObject *number = PyLong_FromUnsignedLong(peer);
        int failed = !number || PyObject_SetAttr(run->operation, peer_name, number) < 0;
        Py_XDECREF(number);
        if (failed) return -1;
        run->waits_for = peer;
        run->is_told = 1;
    }
    return 0;
}

static int is_aligned(const Py_buffer *view, const Schedule *schedule) {
    return !schedule->reduction || (uintptr_t)view->buf % schedule->reduction->num_bytes == 0;
}

static int hold_places(Run *run, PyObject *own, PyObject *out) {
    const Schedule *schedule = run->schedule;
    if (PyObject_GetBuffer(own, &run->own, PyBUF_SIMPLE) < 0) return -1;
    if (PyObject_GetBuffer(out, &run->out, PyBUF_WRITABLE) < 0) return -1;
    const char *own_begin = run->own.buf, *out_begin = run->out.buf;
    int overlaps = run->own.len && run->out.len && own_begin < out_begin + run->out.len && out_begin < own_begin + run->own.len;
    if (overlaps && (own_begin != out_begin || run->own.len != run->out.len || !schedule->reduction))
        return PyErr_SetString(PyExc_ValueError, "the arrays share memory"), -1;
    if (run->own.len != schedule->sizes[OWN] || run->out.len != schedule->sizes[OUT] || !is_aligned(&run->own, schedule) ||
        !is_aligned(&run->out, schedule))
        return PyErr_SetString(PyExc_ValueError, "these are not the arrays of the schedule"), -1;
    size_t num_bytes = (size_t)schedule->sizes[SCRATCH];
    void *scratch = NULL;
    if (num_bytes && posix_memalign(&scratch, SCRATCH_ALIGNMENT, num_bytes)) return PyErr_NoMemory(), -1;
    run->scratch = scratch;
    run->places[OWN] = run->own.buf, run->places[OUT] = run->out.buf, run->places[SCRATCH] = scratch;
    run->is_large = schedule->sizes[OWN] > LARGE_BYTES || schedule->sizes[OUT] > LARGE_BYTES;
    return 0;
}

static void begin_run(Worker *self, Run *run) {
    Run **link = &self->running;
    while (*link) link = &(*link)->next;
    *link = run;
    self->num_large += (size_t)run->is_large;
    if (!run->is_large) advance_all(self); /* else whoever polls does, without the GIL */
}

/* **Arguments:** schedule, head, own, out. */
static Run *new_run(Worker *self, uint64_t tag, PyObject *const *arguments) {
    PyObject *schedule_object = arguments[0], *head = arguments[1];
    if (!PyObject_TypeCheck(schedule_object, schedule_type) || !PyBytes_Check(head) || PyBytes_Size(head) != HEAD_BYTES)
        return PyErr_SetString(PyExc_ValueError, "no schedule, or no head"), NULL;
    Schedule *schedule = (Schedule *)schedule_object;
    if (schedule->max_peer >= (int64_t)self->num_peers) return PyErr_SetString(PyExc_ValueError, "no such peer"), NULL;
    size_t num_bytes = sizeof(Run) + schedule->num_tickets * (sizeof(Request) + 2 * sizeof(ucp_dt_iov_t));
    Run *run = calloc(1, num_bytes);
    if (!run) return PyErr_NoMemory(), NULL;
    run->parts = (ucp_dt_iov_t *)(run->requests + schedule->num_tickets);
    run->worker = self;
    run->schedule = schedule;
    run->tag = tag;
    run->schedule_object = schedule_object, run->head_object = head;
    Py_INCREF(schedule_object);
    Py_INCREF(head);
    run->head = PyBytes_AsString(head);
    for (size_t i = 0; i < schedule->num_tickets; i++) {
        run->requests[i].worker = self;
        run->requests[i].run = run;
    }
    if (hold_places(run, arguments[2], arguments[3]) < 0) return free_run(run), NULL;
    return run;
}

#endif
