/* Runs schedules without the GIL.
 *
 * A run belongs to a worker. Whoever makes the worker progress goes on with its runs, as far as what they wait for has
 * ended.
 *
 * Who includes this has a `Worker` with a field `runs`, a `Request` with a `ticket`, and the functions that are declared
 * here; it calls `end_of_run` when a request of a run has ended, and polls with `poll_for`. */

#ifndef BRAIDAX_RUNS_H
#define BRAIDAX_RUNS_H

#include <fenv.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "copying.h"
#include "operations.h"
#include "schedules.h"

#define RUN_TAG_BITS 44      /* of messages, see MAX_TAG */
#define RUN_SECONDS 1e-3     /* of spinning at least, with others let in between: to wake costs more than most runs */
#define SPARE_BYTES (1 << 20) /* of scratch memory that is kept at most, for the next run */

struct Run {
    Run *next;
    Worker *worker;
    PyObject *operation, *schedule_object, *head_object;
    Schedule *schedule;
    const char *head;
    Py_buffer own, out;
    char *places[NUM_PLACES], *scratch;
    size_t scratch_bytes, max_tickets; /* that there is memory for */
    uint64_t tag;
    size_t position;   /* of the step that is next */
    size_t num_open;   /* requests that have not ended */
    Request *failed;   /* the first request that has */
    int is_large, is_told, is_kept, float_errors; /* the last ones are bits, see `reduce` */
    Caller *caller;     /* that waits for it; there is no operation as long as one does */
    unsigned waits_for; /* the peer that Python was told of last */
    Request requests[]; /* one for each ticket */
};

/* What the includer does: */
static int usable(Worker *self);                       /* else it sets an exception */
static int poll_for(Worker *self, double seconds);     /* with the GIL; progresses, and tells what has ended */
static void post(Worker *self, Request *request);      /* begins to send or receive the message of its step */
static void check_ended(Worker *self, Request *request); /* may yet give an ended receive another status */
static int is_known_still(const Request *request);     /* whether a peer may read its memory, though all is closed */
/* Fails an operation, for which an ended request stands. */
static int tell_error(Worker *self, PyObject *operation, Request *request, size_t capacity);

/* Running: the GIL may not be held */


static char *at(const Run *run, const Position *position) { return run->places[position->place] + position->begin; }

/* What a message is received into. */
static size_t room_of(const Step *step) { return (size_t)(step->capacity ? step->capacity : step->num_bytes); }

static void post_step(Worker *self, Run *run, const Step *step) {
    Request *request = &run->requests[step->ticket];
    request->ticket.step = step;
    request->ticket.peer = (unsigned)step->peer;
    request->ticket.is_send = step->kind == SEND;
    run->num_open++;
    post(self, request);
}

/* Whether what a request has received is a message, and fits; an ended receive is looked at once. */
static int has_come(Worker *self, Run *run, const Step *step) {
    Request *request = &run->requests[step->ticket];
    Ticket *ticket = &request->ticket;
    if (ticket->is_send) return 1;
    check_ended(self, request);
    if (ticket->status) return 0;
    const Step *posted = ticket->step;
    if (posted->capacity && (ticket->num_bytes < HEAD_BYTES || memcmp(at(run, &posted->to), run->head, HEAD_BYTES))) return 0;
    return ticket->num_bytes == (size_t)posted->num_bytes + (posted->capacity ? HEAD_BYTES : 0);
}

/* To be called when a request of a run has ended. */
static void end_of_run(Request *request) {
    Run *run = request->ticket.run;
    run->num_open--;
    if (request->ticket.status && !run->failed) run->failed = request;
}

/* Of what reductions note, which on x86-64 is all in one register; the C library has another one loaded, too, slowly. */
#if defined(__x86_64__)
#define CLEAR_FLOAT_ERRORS() _mm_setcsr(_mm_getcsr() & ~(unsigned)FE_ALL_EXCEPT)
#define FLOAT_ERRORS() ((int)_mm_getcsr() & (FE_OVERFLOW | FE_UNDERFLOW | FE_INVALID))
#else
#define CLEAR_FLOAT_ERRORS() feclearexcept(FE_ALL_EXCEPT)
#define FLOAT_ERRORS() fetestexcept(FE_OVERFLOW | FE_UNDERFLOW | FE_INVALID)
#endif

/* Overflows and the like are noted: bit 0 for an overflow, 1 for an underflow, 2 for an invalid operation. */
static void reduce(Run *run, const Step *step) {
    const NamedReduction *reduction = run->schedule->reduction;
    if (reduction->can_overflow) CLEAR_FLOAT_ERRORS();
    reduction->reduce(at(run, &step->to), at(run, &step->first), at(run, &step->second), (size_t)step->num_bytes);
    if (!reduction->can_overflow) return;
    int found = FLOAT_ERRORS();
    run->float_errors |= (found & FE_OVERFLOW ? 1 : 0) | (found & FE_UNDERFLOW ? 2 : 0) | (found & FE_INVALID ? 4 : 0);
}

/* Goes on with a run; returns whether it is over. */
static int advance(Worker *self, Run *run) {
    const Schedule *schedule = run->schedule;
    for (; run->position < schedule->num_steps && !run->failed; run->position++) {
        const Step *step = &schedule->steps[run->position];
        switch (step->kind) {
        case SEND:
        case RECEIVE:
            post_step(self, run, step);
            break;
        case WAIT:
            if (!run->requests[step->ticket].ticket.has_ended) return 0;
            if (!has_come(self, run, step)) run->failed = &run->requests[step->ticket];
            break;
        case REDUCE: reduce(run, step); break;
        case COPY: copy_block(at(run, &step->to), at(run, &step->first), (size_t)step->num_bytes); break;
        }
    }
    return 1;
}

static int can_go_on(const Run *run) {
    return run->failed || run->position >= run->schedule->num_steps ||
           run->schedule->steps[run->position].kind != WAIT ||
           run->requests[run->schedule->steps[run->position].ticket].ticket.has_ended;
}

static void advance_all(Worker *self) {
    Run *run;
    for (Run **link = &self->runs.running; (run = *link);) {
        if (can_go_on(run) && advance(self, run)) {
            *link = run->next;
            run->next = self->runs.over;
            self->runs.over = run;
        } else {
            link = &run->next;
        }
    }
}

/* Runs: with the GIL */

static void keep_scratch(Runs *runs, void *scratch, size_t num_bytes) {
    if (num_bytes > SPARE_BYTES || num_bytes <= runs->spare_bytes) return free(scratch);
    free(runs->spare_scratch);
    runs->spare_scratch = scratch, runs->spare_bytes = num_bytes;
}

static int take_scratch(Runs *runs, Run *run, size_t num_bytes) {
    void *scratch = runs->spare_scratch;
    run->scratch_bytes = runs->spare_bytes;
    if (num_bytes <= runs->spare_bytes) {
        runs->spare_scratch = NULL, runs->spare_bytes = 0;
    } else if (posix_memalign(&scratch, SCRATCH_ALIGNMENT, run->scratch_bytes = num_bytes)) {
        return PyErr_NoMemory(), -1;
    }
    run->scratch = scratch;
    return 0;
}

/* Returns a run that is all zero but for what it has memory for. */
static Run *take_run(Runs *runs, size_t num_tickets) {
    size_t num_bytes = sizeof(Run) + num_tickets * sizeof(Request), max_tickets = num_tickets;
    Run *run = runs->spare;
    if (run && num_tickets <= run->max_tickets) {
        max_tickets = run->max_tickets;
        runs->spare = NULL;
        memset(run, 0, num_bytes);
    } else if (!(run = calloc(1, num_bytes))) {
        return PyErr_NoMemory(), NULL;
    }
    run->max_tickets = max_tickets;
    return run;
}

static void keep_run(Runs *runs, Run *run) {
    if (runs->spare && run->max_tickets <= runs->spare->max_tickets) return free(run);
    free(runs->spare);
    runs->spare = run;
}

/* To be called when no more runs follow. */
static void free_spares(Runs *runs) {
    free(runs->spare);
    free(runs->spare_scratch);
    runs->spare = NULL, runs->spare_scratch = NULL, runs->spare_bytes = 0;
}

static void free_run(Run *run) {
    Runs *runs = &run->worker->runs;
    if (run->own.obj) PyBuffer_Release(&run->own);
    if (run->out.obj) PyBuffer_Release(&run->out);
    Py_XDECREF(run->operation);
    Py_XDECREF(run->schedule_object);
    Py_XDECREF(run->head_object);
    if (run->scratch) keep_scratch(runs, run->scratch, run->scratch_bytes);
    keep_run(runs, run);
}

static void free_runs(Run **list) {
    for (Run *run; (run = *list);) {
        *list = run->next;
        int is_kept = 0;
        for (size_t i = 0; i < run->schedule->num_tickets; i++) is_kept |= is_known_still(&run->requests[i]);
        if (!is_kept) free_run(run); /* else its memory stays */
    }
}

/* What went wrong first: a member that brings something else explains whatever else came of it. */
static Request *cause_of(Run *run) {
    for (size_t i = 0; i < run->schedule->num_tickets; i++) {
        Ticket *ticket = &run->requests[i].ticket;
        if (ticket->step && ticket->has_ended && !ticket->is_send && ticket->step->capacity &&
            ticket->num_bytes >= HEAD_BYTES && !ticket->status &&
            memcmp(at(run, &ticket->step->to), run->head, HEAD_BYTES))
            return &run->requests[i];
    }
    return run->failed;
}

/* Makes the operation of what began without one. **Arguments:** `place`: of the caller in that. */
static int make_operation(Worker *self, PyObject **operation, Caller **place, unsigned long long peer) {
    Caller *caller = *place;
    *place = NULL;
    *operation = PyObject_CallFunction(self->runs.operation_type, "K", peer);
    caller->operation = *operation;
    Py_XINCREF(caller->operation);
    return *operation ? 0 : -1;
}

static int tell_failed(Worker *self, Run *run) {
    Request *request = cause_of(run);
    Ticket *ticket = &request->ticket;
    const Step *step = ticket->step;
    if (ticket->status) return tell_error(self, run->operation, request, room_of(step));
    const char *theirs = step->capacity ? at(run, &step->to) : "";
    Py_ssize_t num_bytes = step->capacity ? (Py_ssize_t)ticket->num_bytes : 0;
    PyObject *result = PyObject_CallFunction(self->runs.disagreed, "OIy#y#nn", run->operation, ticket->peer, theirs,
                                             num_bytes < HEAD_BYTES ? num_bytes : HEAD_BYTES, run->head,
                                             (Py_ssize_t)HEAD_BYTES, (Py_ssize_t)ticket->num_bytes,
                                             (Py_ssize_t)step->num_bytes + (step->capacity ? HEAD_BYTES : 0));
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static int tell_end(Worker *self, Run *run) {
    Caller *caller = run->caller;
    if (caller) {
        caller->is_over = 1;
        if (!run->failed && !run->float_errors) return 0;
        if (make_operation(self, &run->operation, &run->caller, self->runs.rank) < 0) return -1;
    }
    if (!run->operation) return 0; /* its caller has been told of something worse */
    return run->failed ? tell_failed(self, run) : finish(run->operation, (size_t)run->float_errors);
}

/* Tells Python of the runs that are over. */
static int tell_over(Worker *self) {
    for (Run *run; (run = self->runs.over);) {
        self->runs.over = run->next;
        self->runs.num_large -= (size_t)run->is_large;
        int failed = tell_end(self, run);
        if (run->num_open) { /* it has failed: its memory stays until the worker closes */
            run->next = self->runs.left_over;
            self->runs.left_over = run;
        } else {
            free_run(run);
        }
        if (failed) return -1;
    }
    return 0;
}

/* Says whom the runs wait for, which errors of waits name. */
static int tell_waiting(Worker *self) {
    for (Run *run = self->runs.running; run; run = run->next) {
        const Step *step = &run->schedule->steps[run->position];
        if (run->position >= run->schedule->num_steps || step->kind != WAIT) continue;
        unsigned peer = run->requests[step->ticket].ticket.peer;
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
    if (get_bytes(own, &run->own, PyBUF_SIMPLE) < 0 || get_bytes(out, &run->out, PyBUF_WRITABLE) < 0) return -1;
    const char *own_begin = run->own.buf, *out_begin = run->out.buf;
    int overlaps = run->own.len && run->out.len && own_begin < out_begin + run->out.len && out_begin < own_begin + run->own.len;
    if (overlaps && (own_begin != out_begin || run->own.len != run->out.len || !schedule->reduction))
        return PyErr_SetString(PyExc_ValueError, "the arrays share memory"), -1;
    if (run->own.len != schedule->sizes[OWN] || run->out.len != schedule->sizes[OUT] || !is_aligned(&run->own, schedule) ||
        !is_aligned(&run->out, schedule))
        return PyErr_SetString(PyExc_ValueError, "these are not the arrays of the schedule"), -1;
    size_t num_bytes = (size_t)schedule->sizes[SCRATCH];
    if (num_bytes && take_scratch(&run->worker->runs, run, num_bytes) < 0) return -1;
    run->places[OWN] = run->own.buf, run->places[OUT] = run->out.buf, run->places[SCRATCH] = run->scratch;
    run->is_large = schedule->sizes[OWN] > LARGE_BYTES || schedule->sizes[OUT] > LARGE_BYTES;
    return 0;
}

static void begin_run(Worker *self, Run *run) {
    Run **link = &self->runs.running;
    while (*link) link = &(*link)->next;
    *link = run;
    self->runs.num_large += (size_t)run->is_large;
    if (!run->is_large) advance_all(self); /* else whoever polls does, without the GIL */
}

/* **Arguments:** schedule, head, own, out. */
static Run *new_run(Worker *self, uint64_t tag, PyObject *const *arguments) {
    PyObject *schedule_object = arguments[0], *head = arguments[1];
    if (!PyObject_TypeCheck(schedule_object, schedule_type) || !PyBytes_Check(head) || PyBytes_Size(head) != HEAD_BYTES)
        return PyErr_SetString(PyExc_ValueError, "no schedule, or no head"), NULL;
    Schedule *schedule = (Schedule *)schedule_object;
    if (schedule->max_peer >= (int64_t)self->runs.num_peers) return PyErr_SetString(PyExc_ValueError, "no such peer"), NULL;
    Run *run = take_run(&self->runs, schedule->num_tickets);
    if (!run) return NULL;
    run->worker = self;
    run->schedule = schedule;
    run->tag = tag;
    run->schedule_object = schedule_object, run->head_object = head;
    Py_INCREF(schedule_object);
    Py_INCREF(head);
    run->head = PyBytes_AsString(head);
    for (size_t i = 0; i < schedule->num_tickets; i++) run->requests[i].ticket.run = run;
    if (hold_places(run, arguments[2], arguments[3]) < 0) return free_run(run), NULL;
    return run;
}

/* Runs a schedule, and makes an operation of it only when it fails or takes longer than the spinning. */
static PyObject *worker_run(Worker *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!usable(self)) return NULL;
    if (count != 6) return PyErr_SetString(PyExc_TypeError, "expected 6 arguments"), NULL;
    uint64_t tag = PyLong_AsUnsignedLongLong(arguments[0]);
    double seconds = PyFloat_AsDouble(arguments[5]);
    if (PyErr_Occurred()) return NULL;
    if (tag >> RUN_TAG_BITS) return PyErr_SetString(PyExc_ValueError, "no such tag"), NULL;
    Run *run = new_run(self, tag, arguments + 1);
    if (!run) return NULL;
    Caller caller = {.is_over = 0};
    run->caller = &caller;
    begin_run(self, run);
    int failed = tell_over(self);
    if (!failed && !caller.is_over && seconds >= 0) failed = poll_for(self, seconds);
    if (!failed && !caller.is_over) failed = make_operation(self, &run->operation, &run->caller, self->runs.rank) < 0 || tell_waiting(self) < 0;
    if (!caller.is_over) run->caller = NULL;
    if (failed) Py_CLEAR(caller.operation);
    if (failed) return NULL;
    if (caller.operation) return caller.operation;
    Py_RETURN_NONE;
}

#endif
