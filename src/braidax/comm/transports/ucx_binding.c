/* The binding of UCX that braidax.comm.transports.ucx drives; ucx_binding.pyi says what Python sees of it.
 *
 * UCX is loaded at run time, so this compiles and imports without it. A worker has one caller at a time. UCX ends
 * requests in callbacks, which may run without the GIL: they only move a request to the list of ended ones, and the
 * caller ends their operations when it holds the GIL again. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <dlfcn.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BINDING "ucx_binding"
#include "operations.h"
#include "schedules.h"
#include "ucx_abi.h"

#define TAG_BITS 45              /* the upper bits hold the rank of the sender */
#define GIVEN_UP_TAG (((uint64_t)1 << 44) + 1) /* above those of messages; the one before is that of greetings */
#define ROUNDS_WITH_GIL 8        /* of progress: a microsecond, shorter than waiting for the GIL may take */
#define MAX_ROUNDS 4096          /* of progress without an end, when nobody asked to spin */
#define DRAIN_ROUNDS 1000000     /* bounds what a lost peer had sent before */
#define FORCED_CLOSE_SECONDS 0.5 /* bounds the end of copies that UCX cannot stop */
#define GIVE_UP_SECONDS 0.1      /* bounds what it takes to say that sends are given up */
#define INSIDE_BYTES 1024        /* UCX sends so little at once, unless its user says otherwise */
#define LOOK_ROUNDS 32           /* of progress: they take all that lies in a full queue of shared memory */
#define IDLE_ROUNDS 1000         /* of progress in vain, besides one a request: nothing is copied any more */
#define MAX_TRANSPORTS 16
#define LITTLE_BYTES 192         /* UCX copies so little at once, where an element of its queues has room for it */

#define DECLARE(result, name, parameters) static result(*name) parameters;
UCX_FUNCTIONS(DECLARE)

static void *library; /* UCX, once loaded; stays until the process ends, as UCX's own threads demand */

typedef struct Worker Worker;

typedef struct Request { /* a send or receive that UCX has not ended, or that Python does not know to have ended */
    Ticket ticket; /* one of a run has no operation and no views */
    struct Request *previous, *next, *next_ended;
    PyObject *operation;
    Caller *caller; /* in place of an operation */
    Py_buffer *views; /* `one`, or allocated together with `parts` */
    Py_buffer one;
    ucp_dt_iov_t *parts;
    Py_ssize_t num_views;
    Worker *worker;
    void *handle; /* UCX's, while it has not ended */
    int is_large, is_unchecked, is_kept;
    ucp_dt_iov_t headed[2]; /* of a run */
} Request;

typedef struct {
    Worker *worker;
    void *endpoint;
    int is_lost, is_given_up, is_owed; /* owed: sends that it has not received */
    ucs_status_t status; /* of the loss */
} Peer;

struct Worker {
    PyObject_HEAD
    void *context, *worker;
    int descriptor, is_busy, has_newly_lost, is_abandoned, is_crowded;
    Runs runs;
    Peer *peers;
    PyObject *address, *failed;
    Request *pending, *ended, **ended_end, *freed;
    size_t num_freed;
    size_t num_unended, num_sends; /* with UCX: all, and sends */
    size_t num_unchecked;          /* receives that have ended, see check_received */
    size_t inside_bytes;           /* of messages that need no such check */
    size_t headed_inside_bytes;    /* the same of headed ones, which are copied before they are sent */
};

static PyObject *ucx_failed(const char *what, ucs_status_t status) {
    return PyErr_Format(PyExc_OSError, "%s: %s", what, ucs_status_string(status));
}

/* Requests */

static Request *new_request(Worker *self, PyObject *operation, unsigned peer, int is_send) {
    Request *request = self->freed;
    if (request) {
        self->freed = request->next;
        self->num_freed--;
    } else if (!(request = malloc(sizeof *request))) {
        PyErr_NoMemory();
        return NULL;
    }
    request->previous = request->next = request->next_ended = NULL;
    Py_XINCREF(operation);
    request->operation = operation;
    request->caller = NULL;
    request->views = &request->one;
    request->num_views = 0;
    request->parts = NULL;
    request->worker = self;
    request->ticket.run = NULL;
    request->ticket.step = NULL;
    request->handle = NULL;
    request->ticket.peer = peer;
    request->ticket.is_send = is_send;
    request->is_large = request->ticket.has_ended = request->is_unchecked = request->is_kept = 0;
    request->ticket.num_bytes = 0;
    return request;
}

static void free_request(Worker *self, Request *request) {
    for (Py_ssize_t i = 0; i < request->num_views; i++) PyBuffer_Release(&request->views[i]);
    if (request->views != &request->one) free(request->views);
    free(request->parts);
    Py_XDECREF(request->operation);
    if (self->num_freed < MAX_FREE_REQUESTS) {
        request->next = self->freed;
        self->freed = request;
        self->num_freed++;
    } else {
        free(request);
    }
}

static void count(Worker *self, Request *request, int change) {
    self->num_unended += (size_t)change;
    self->num_sends += (size_t)(request->ticket.is_send ? change : 0);
    self->runs.num_large += (size_t)(request->is_large ? change : 0);
}

static void link_pending(Worker *self, Request *request) {
    Py_ssize_t large_bytes = request->ticket.is_send ? LARGE_BYTES : LARGE_PLACE_BYTES;
    for (Py_ssize_t i = 0; i < request->num_views; i++) request->is_large |= request->views[i].len > large_bytes;
    count(self, request, 1);
    request->previous = NULL;
    request->next = self->pending;
    if (self->pending) self->pending->previous = request;
    self->pending = request;
}

static void unlink_pending(Worker *self, Request *request) {
    if (request->previous) request->previous->next = request->next;
    else self->pending = request->next;
    if (request->next) request->next->previous = request->previous;
}

static void lose(Worker *self, Peer *peer, ucs_status_t status) {
    peer->status = status;
    peer->is_lost = self->has_newly_lost = 1;
}

/* Fails an operation, for which an ended request stands. */
static int tell_error(Worker *self, PyObject *operation, Request *request, size_t capacity) {
    ucs_status_t status = (ucs_status_t)request->ticket.status;
    Peer *peer = &self->peers[request->ticket.peer];
    if (!peer->is_lost && is_loss(status)) lose(self, peer, status); /* not all is told to on_lost */
    PyObject *result = PyObject_CallFunction(self->failed, "OIsOnn", operation, request->ticket.peer, ucs_status_string(status),
                                             peer->is_lost ? Py_True : Py_False, (Py_ssize_t)request->ticket.num_bytes,
                                             (Py_ssize_t)capacity);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* A copy that cannot be sent has no operation: what comes back has a receive, which ends with the loss of its peer. */
static int tell_unsent(Worker *self, Request *request) {
    Peer *peer = &self->peers[request->ticket.peer];
    if (!peer->is_lost) lose(self, peer, (ucs_status_t)request->ticket.status);
    return 0;
}

static int tell_caller(Worker *self, Request *request);

/* Tells Python of an end, and lets go of the request and its buffers. */
static int tell(Worker *self, Request *request) {
    int failed = request->caller ? tell_caller(self, request) : 0;
    if (!request->ticket.status)
        failed |= request->operation ? finish(request->operation, request->ticket.is_send ? 0 : request->ticket.num_bytes) : 0;
    else if (request->operation)
        failed |= tell_error(self, request->operation, request, request->num_views ? (size_t)request->views[0].len : 0);
    else if (request->ticket.is_send)
        failed |= tell_unsent(self, request);
    free_request(self, request);
    return failed;
}

/* A large message is copied out of the memory of its sender, whatever lies there by then: a sender that gives up says so
 * before it lets go of that memory. So what was received is a message only if nothing of the kind has come since. */
static void check(Worker *self, Request *request) {
    request->is_unchecked = 0;
    ucp_tag_recv_info_t info;
    uint64_t tag = (uint64_t)request->ticket.peer << TAG_BITS | GIVEN_UP_TAG;
    if (ucp_tag_probe_nb(self->worker, tag, UINT64_MAX, 0, &info)) request->ticket.status = UCS_ERR_CONNECTION_RESET;
}

static void look(Worker *self) {
    for (int round = 0; round < LOOK_ROUNDS && ucp_worker_progress(self->worker); round++) continue;
}

static void check_received(Worker *self) { /* the GIL may not be held */
    Request **end = self->ended_end;
    look(self);
    for (Request **next = &self->ended; next != end; next = &(*next)->next_ended) {
        Request *request = *next;
        if (!request->is_unchecked) continue;
        self->num_unchecked--;
        check(self, request);
    }
}

static int tell_ended(Worker *self) {
    Request *request;
    while (self->num_unchecked) check_received(self);
    while ((request = self->ended)) {
        if (!(self->ended = request->next_ended)) self->ended_end = &self->ended;
        unlink_pending(self, request);
        if (tell(self, request) < 0) return -1;
    }
    return 0;
}

static void end_of_run(Request *request);

static void ended(Request *request, ucs_status_t status) { /* the GIL may not be held */
    Worker *self = request->worker;
    Peer *peer = &self->peers[request->ticket.peer];
    if (request->handle) ucp_request_free(request->handle);
    request->handle = NULL;
    request->ticket.status = status == UCS_ERR_CANCELED && peer->is_lost ? peer->status : status;
    request->ticket.has_ended = 1;
    count(self, request, -1);
    if (request->ticket.run) {
        unlink_pending(self, request);
        end_of_run(request);
        return;
    }
    *self->ended_end = request;
    self->ended_end = &request->next_ended;
}

static void on_sent(void *handle, ucs_status_t status, void *user_data) {
    ((Request *)user_data)->handle = handle;
    ended(user_data, status);
}

static void on_received(void *handle, ucs_status_t status, const ucp_tag_recv_info_t *info, void *user_data) {
    Request *request = user_data;
    request->handle = handle;
    request->ticket.num_bytes = status == UCS_OK || status == UCS_ERR_MESSAGE_TRUNCATED ? info->length : 0;
    Worker *self = request->worker;
    int is_headed = request->ticket.run && request->ticket.step->capacity;
    request->is_unchecked = status == UCS_OK && info->length > (is_headed ? self->headed_inside_bytes : self->inside_bytes);
    if (!request->ticket.run) request->worker->num_unchecked += (size_t)request->is_unchecked;
    ended(request, status);
}

static void on_lost(void *user_data, void *endpoint, ucs_status_t status) {
    Peer *peer = user_data;
    (void)endpoint;
    lose(peer->worker, peer, status);
}

static void give_up_endpoint(Peer *peer) {
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t handle = peer->endpoint ? ucp_ep_close_nbx(peer->endpoint, &param) : NULL;
    peer->endpoint = NULL;
    if (handle && !is_error(handle)) ucp_request_free(handle);
}

/* What lost peers had sent is received first; then all that waits for them is canceled. */
static void cancel_lost(Worker *self) {
    for (int round = 0; round < DRAIN_ROUNDS && ucp_worker_progress(self->worker); round++) continue;
    self->has_newly_lost = 0;
    for (unsigned i = 0; i < self->runs.num_peers; i++)
        if (self->peers[i].is_lost) give_up_endpoint(&self->peers[i]);
    for (Request *request = self->pending; request; request = request->next)
        if (!request->ticket.is_send && request->handle && self->peers[request->ticket.peer].is_lost)
            ucp_request_cancel(self->worker, request->handle);
}

/* Sending and receiving */

static int usable(Worker *self) {
    if (self->worker && !self->is_busy) return 1;
    PyErr_SetString(PyExc_RuntimeError, self->worker ? "UCX has one caller at a time" : "this rank's UCX is closed");
    return 0;
}

static int parse_peer(Worker *self, PyObject *const *arguments, unsigned *peer, uint64_t *tag) {
    unsigned long number = PyLong_AsUnsignedLong(arguments[0]);
    *tag = PyLong_AsUnsignedLongLong(arguments[1]);
    if (PyErr_Occurred()) return 0;
    if (number >= self->runs.num_peers || *tag >> TAG_BITS) {
        PyErr_SetString(PyExc_ValueError, "no such peer or tag");
        return 0;
    }
    *peer = (unsigned)number;
    return 1;
}

/* Holds the buffers of a message; fills in what is sent. */
static int hold(Request *request, PyObject *buffers, void **data, size_t *count, ucp_request_param_t *param) {
    PyObject *tuple = PySequence_Tuple(buffers); /* itself, when it is one */
    if (!tuple) return -1;
    Py_ssize_t size = PyTuple_Size(tuple);
    int status = -1;
    if (size > 1) {
        request->views = malloc((size_t)size * sizeof *request->views);
        request->parts = malloc((size_t)size * sizeof *request->parts);
        if (!request->views || !request->parts) {
            if (!request->views) request->views = &request->one;
            PyErr_NoMemory();
            goto end;
        }
    }
    size_t num_parts = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        Py_buffer *view = &request->views[i];
        if (get_bytes(PyTuple_GetItem(tuple, i), view, PyBUF_SIMPLE) < 0) goto end;
        request->num_views++;
        if (view->len) {
            *data = view->buf;
            *count = (size_t)view->len;
            if (size > 1) request->parts[num_parts] = (ucp_dt_iov_t){view->buf, (size_t)view->len};
            num_parts++;
        }
    }
    if (num_parts > 1) {
        *data = request->parts;
        *count = num_parts;
        param->datatype = UCP_DATATYPE_IOV;
    }
    status = 0;
end:
    Py_DECREF(tuple);
    return status;
}

/* What UCX made of a request that it was given. */
static PyObject *begun(Worker *self, Request *request, ucs_status_ptr_t handle) {
    if (request->ticket.has_ended) { /* its callback was called at once */
        if (self->ended == request && tell_ended(self) < 0) return NULL;
    } else if (handle && !is_error(handle)) {
        request->handle = handle;
    } else {
        request->ticket.status = handle ? error_of(handle) : UCS_OK;
        count(self, request, -1);
        unlink_pending(self, request);
        if (tell(self, request) < 0) return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *begin_send(Worker *self, unsigned peer, uint64_t tag, PyObject *buffers, PyObject *operation) {
    Request *request = new_request(self, operation, peer, 1);
    if (!request) return NULL;
    ucp_request_param_t param;
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                         UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.cb.send = on_sent;
    param.user_data = request;
    param.datatype = UCP_DATATYPE_CONTIG_BYTE;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    void *data = NULL;
    size_t size = 0;
    if (hold(request, buffers, &data, &size, &param) < 0) {
        free_request(self, request);
        return NULL;
    }
    link_pending(self, request);
    ucs_status_ptr_t handle = (ucs_status_ptr_t)(intptr_t)self->peers[peer].status;
    if (!self->peers[peer].is_lost)
        handle = ucp_tag_send_nbx(self->peers[peer].endpoint, data, size, self->runs.rank << TAG_BITS | tag, &param);
    return begun(self, request, handle);
}

static PyObject *begin_receive(Worker *self, unsigned peer, uint64_t tag, PyObject *buffer, PyObject *operation,
                               Caller *caller) {
    Request *request = new_request(self, operation, peer, 0);
    if (!request) return NULL;
    request->caller = caller;
    if (get_bytes(buffer, &request->one, PyBUF_WRITABLE) < 0) {
        free_request(self, request);
        return NULL;
    }
    request->num_views = 1;
    ucp_request_param_t param;
    /* UCX tells the length of a message that is too long in the callback only. */
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                         UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    param.cb.recv = on_received;
    param.user_data = request;
    param.datatype = UCP_DATATYPE_CONTIG_BYTE;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    link_pending(self, request);
    ucs_status_ptr_t handle = (ucs_status_ptr_t)(intptr_t)self->peers[peer].status;
    if (!self->peers[peer].is_given_up)
        handle = ucp_tag_recv_nbx(self->worker, request->one.buf, (size_t)request->one.len, (uint64_t)peer << TAG_BITS | tag,
                                  UINT64_MAX, &param);
    if (self->peers[peer].is_lost) self->has_newly_lost = 1; /* the next poll cancels it, unless the message is there */
    return begun(self, request, handle);
}

/* Sends what UCX copies at once, so that it knows no request; returns whether it did. */
static int sent_at_once(Worker *self, unsigned peer, uint64_t tag, const char *data, size_t size) {
    if (self->peers[peer].is_lost) return 0;
    ucp_request_param_t param;
    param.op_attr_mask = UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL;
    return !ucp_tag_send_nbx(self->peers[peer].endpoint, data, size, self->runs.rank << TAG_BITS | tag, &param);
}

/* Runs of schedules */

#include "runs.h"

/* The same of a headed message. */
static int head_sent_at_once(Worker *self, const Run *run, const Step *step) {
    char whole[LITTLE_BYTES];
    size_t size = (size_t)step->num_bytes;
    if (!step->capacity || size > sizeof whole - HEAD_BYTES) return 0;
    memcpy(whole, run->head, HEAD_BYTES);
    if (size) memcpy(whole + HEAD_BYTES, at(run, &step->to), size);
    return sent_at_once(self, (unsigned)step->peer, run->tag, whole, HEAD_BYTES + size);
}

static void post(Worker *self, Request *request) {
    Ticket *ticket = &request->ticket;
    Run *run = ticket->run;
    const Step *step = ticket->step;
    Peer *peer = &self->peers[step->peer];
    request->worker = self;
    request->is_large = step->num_bytes > LARGE_BYTES;
    link_pending(self, request);
    ucp_request_param_t param;
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                         UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.user_data = request;
    param.datatype = UCP_DATATYPE_CONTIG_BYTE;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    ucs_status_ptr_t handle = (ucs_status_ptr_t)(intptr_t)peer->status;
    void *data = at(run, &step->to);
    if (ticket->is_send) {
        size_t size = (size_t)step->num_bytes;
        if (step->capacity) param.op_attr_mask |= UCP_OP_ATTR_FLAG_FAST_CMPL; /* a copy, which nobody has to ask for */
        if (step->capacity && !size) {
            data = (void *)run->head, size = HEAD_BYTES;
        } else if (step->capacity) {
            request->headed[0] = (ucp_dt_iov_t){(void *)run->head, HEAD_BYTES};
            request->headed[1] = (ucp_dt_iov_t){data, size};
            data = request->headed, size = 2, param.datatype = UCP_DATATYPE_IOV;
        }
        param.cb.send = on_sent;
        if (head_sent_at_once(self, run, step))
            handle = NULL;
        else if (!peer->is_lost)
            handle = ucp_tag_send_nbx(peer->endpoint, data, size, self->runs.rank << TAG_BITS | run->tag, &param);
    } else {
        param.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
        param.cb.recv = on_received;
        if (!peer->is_given_up)
            handle = ucp_tag_recv_nbx(self->worker, data, room_of(step), (uint64_t)step->peer << TAG_BITS | run->tag,
                                      UINT64_MAX, &param);
        if (peer->is_lost) self->has_newly_lost = 1;
    }
    if (ticket->has_ended) return; /* its callback was called at once */
    if (handle && !is_error(handle)) request->handle = handle;
    else ended(request, handle ? error_of(handle) : UCS_OK);
}

static void check_ended(Worker *self, Request *request) {
    if (!request->is_unchecked) return;
    look(self);
    check(self, request);
}

static int is_known_still(const Request *request) { return request->is_kept; }

/* Progress */

static int has_news(Worker *self) { return self->ended || self->runs.over || self->has_newly_lost; }

static unsigned progress(Worker *self) {
    unsigned moved = ucp_worker_progress(self->worker);
    if (self->runs.running) advance_all(self);
    return moved;
}

static void spin(Worker *self, double seconds) { /* without the GIL */
    int rounds_per_look = self->is_crowded ? ROUNDS_WHEN_CROWDED : ROUNDS_PER_LOOK;
    double begin = seconds > 0 ? now() : 0, moved_at = begin;
    unsigned has_moved = 0; /* since the last look */
    for (int round = 1; !has_news(self); round++) {
        unsigned moved = progress(self);
        has_moved |= moved;
        if (seconds > 0 ? round % rounds_per_look : moved && round < MAX_ROUNDS) continue;
        double time = seconds > 0 ? now() : 0;
        if (time - begin >= seconds) break;
        if (has_moved) moved_at = time;
        has_moved = 0;
        if (moved) continue;
        if (self->is_crowded) {
            sched_yield();
        } else if (time - moved_at > YIELD_SECONDS) {
            sched_yield();
            for (int turn = 0; turn < MAX_TURNS_AT_REST && turn < (time - moved_at) * TURNS_PER_SECOND; turn++) REST();
        }
    }
}

/* Polls as long as it spins, and tells what has ended. */
static int poll_for(Worker *self, double seconds) {
    if (!self->runs.num_large)
        for (int round = 0; round < ROUNDS_WITH_GIL && !has_news(self); round++) progress(self);
    if (self->runs.running && seconds > 0 && seconds < RUN_SECONDS) seconds = RUN_SECONDS;
    if (self->runs.num_large && seconds > 0 && seconds < LARGE_SECONDS) seconds = LARGE_SECONDS;
    if (!has_news(self) && (self->runs.num_large || seconds > 0)) {
        self->is_busy = 1;
        Py_BEGIN_ALLOW_THREADS
        spin(self, seconds);
        if (self->num_unchecked) check_received(self);
        Py_END_ALLOW_THREADS
        self->is_busy = 0;
    }
    if (self->has_newly_lost) cancel_lost(self);
    return tell_ended(self) < 0 || tell_over(self) < 0 || tell_waiting(self) < 0 ? -1 : 0;
}

#include "calls.h"

static PyObject *worker_poll(Worker *self, PyObject *argument) {
    if (!usable(self)) return NULL;
    double seconds = PyFloat_AsDouble(argument);
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    if (poll_for(self, seconds) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *worker_arm(Worker *self, PyObject *unused) {
    (void)unused;
    if (!usable(self)) return NULL;
    for (Run *run = self->runs.running; run; run = run->next)
        if (can_go_on(run)) Py_RETURN_FALSE;
    return PyBool_FromLong(!has_news(self) && ucp_worker_arm(self->worker) == UCS_OK);
}

/* Beginning and end */

static PyObject *worker_connect(Worker *self, PyObject *arguments) {
    unsigned long long rank;
    int is_crowded;
    PyObject *addresses, *failed, *disagreed, *operation_type;
    if (!usable(self) || !PyArg_ParseTuple(arguments, "KO!OOOp", &rank, &PyTuple_Type, &addresses, &failed, &disagreed,
                                           &operation_type, &is_crowded)) return NULL;
    Py_ssize_t size = PyTuple_Size(addresses);
    if (self->peers || rank >= (unsigned long long)size || size >= (Py_ssize_t)1 << (64 - TAG_BITS))
        return PyErr_Format(PyExc_ValueError, "cannot connect to %zd peers", size);
    if (!(self->peers = calloc((size_t)size, sizeof *self->peers))) return PyErr_NoMemory();
    Py_INCREF(failed);
    Py_INCREF(disagreed);
    Py_INCREF(operation_type);
    self->failed = failed;
    self->runs.disagreed = disagreed;
    self->runs.operation_type = operation_type;
    self->runs.rank = rank;
    self->is_crowded = is_crowded;
    self->runs.num_peers = (unsigned)size;
    PyObject *reasons = PyList_New(0);
    for (Py_ssize_t i = 0; reasons && i < size; i++) {
        const char *address = PyBytes_AsString(PyTuple_GetItem(addresses, i));
        self->peers[i].worker = self;
        ucs_status_t status = UCS_OK;
        if (address) {
            ucp_ep_params_t params = {
                .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                              UCP_EP_PARAM_FIELD_ERR_HANDLER,
                .address = address,
                .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                .err_handler = {on_lost, &self->peers[i]},
            };
            status = ucp_ep_create(self->worker, &params, &self->peers[i].endpoint);
            if (status != UCS_OK) self->peers[i].endpoint = NULL;
            self->peers[i].is_lost = status != UCS_OK;
            self->peers[i].status = status;
        }
        PyObject *reason = address ? PyUnicode_FromString(status == UCS_OK ? "" : ucs_status_string(status)) : NULL;
        if (!reason || PyList_Append(reasons, reason) < 0) Py_CLEAR(reasons);
        Py_XDECREF(reason);
    }
    return reasons;
}

static void progress_until(Worker *self, double deadline, ucs_status_ptr_t *handles) {
    for (int round = 1;; round++) {
        unsigned moved = ucp_worker_progress(self->worker), unfinished = 0;
        for (unsigned i = 0; handles && i < self->runs.num_peers; i++) {
            if (!handles[i]) continue;
            if (is_error(handles[i])) {
                handles[i] = NULL;
            } else if (ucp_request_check_status(handles[i]) == UCS_INPROGRESS) {
                unfinished = 1;
            } else {
                ucp_request_free(handles[i]);
                handles[i] = NULL;
            }
        }
        if (!unfinished && (handles || !self->num_sends)) return;
        if (now() >= deadline) return;
        if (!moved) sched_yield();
    }
}

/* Says to peers that what they have not received of this rank's sends is no message any more, and keeps for good what a
 * peer cannot be told about: see check_received. */
static void give_up_sends(Worker *self, double deadline) {
    for (Request *request = self->pending; request; request = request->next)
        if (request->ticket.is_send && !request->ticket.has_ended) self->peers[request->ticket.peer].is_owed = 1;
    ucs_status_ptr_t *handles = calloc(self->runs.num_peers + 1, sizeof *handles);
    ucp_request_param_t param = {.op_attr_mask = 0};
    for (unsigned i = 0; handles && i < self->runs.num_peers; i++)
        if (self->peers[i].is_owed && self->peers[i].endpoint && !self->peers[i].is_lost)
            handles[i] = ucp_tag_send_nbx(self->peers[i].endpoint, NULL, 0, self->runs.rank << TAG_BITS | GIVEN_UP_TAG, &param);
    if (handles) progress_until(self, deadline, handles);
    for (Request *request = self->pending; request; request = request->next)
        request->is_kept = request->ticket.is_send && !request->ticket.has_ended && (!handles || handles[request->ticket.peer]);
    for (unsigned i = 0; handles && i < self->runs.num_peers; i++)
        if (handles[i]) ucp_request_free(handles[i]);
    free(handles);
}

/* The same to one peer that is about to be given up; returns whether it has been told. */
static int give_up_sends_to(Worker *self, Peer *peer, double deadline) {
    if (!peer->endpoint || peer->is_lost) return 0;
    ucp_request_param_t param = {.op_attr_mask = 0};
    uint64_t tag = self->runs.rank << TAG_BITS | GIVEN_UP_TAG;
    ucs_status_ptr_t handle = ucp_tag_send_nbx(peer->endpoint, NULL, 0, tag, &param);
    if (!handle || is_error(handle)) return !handle;
    while (ucp_request_check_status(handle) == UCS_INPROGRESS && now() < deadline)
        if (!ucp_worker_progress(self->worker)) sched_yield();
    int is_told = ucp_request_check_status(handle) == UCS_OK;
    ucp_request_free(handle);
    return is_told;
}

/* Progresses a worker without endpoints until it copies nothing any more; returns whether that is so.
 *
 * A copy out of a peer's memory (CMA, KNEM) goes on, segment by segment, after its endpoint was given up, although UCX
 * says at once that this is done; destroying the worker before its end aborts the process. A round copies a segment
 * and counts it, or ends a failed copy or the queue of a peer and counts nothing: so many rounds in vain may come in
 * between, whether requests are left or not. Those that wait for a peer that does not answer end with the worker. */
static int settle(Worker *self, double deadline) {
    for (size_t num_idle = 0; num_idle <= self->num_unended + IDLE_ROUNDS;) {
        if (!ucp_worker_progress(self->worker)) num_idle++;
        else if (now() < deadline) num_idle = 0;
        else return 0;
    }
    return 1;
}

static void close_worker(Worker *self, double seconds) { /* without the GIL */
    double deadline = now() + seconds;
    ucs_status_ptr_t *handles = seconds > 0 ? calloc(self->runs.num_peers + 1, sizeof *handles) : NULL;
    if (handles) {
        ucp_request_param_t param = {.op_attr_mask = 0};
        progress_until(self, deadline, NULL);
        for (unsigned i = 0; i < self->runs.num_peers; i++)
            if (!self->peers[i].is_lost) handles[i] = ucp_ep_flush_nbx(self->peers[i].endpoint, &param);
        progress_until(self, deadline, handles);
        for (unsigned i = 0; i < self->runs.num_peers; i++)
            if (handles[i]) ucp_request_free(handles[i]);
        free(handles);
    }
    if (self->num_sends) give_up_sends(self, now() + GIVE_UP_SECONDS);
    for (Request *request = self->pending; request; request = request->next)
        if (request->handle && !request->ticket.is_send) ucp_request_cancel(self->worker, request->handle);
    for (unsigned i = 0; i < self->runs.num_peers; i++) give_up_endpoint(&self->peers[i]);
    self->is_abandoned = !settle(self, now() + FORCED_CLOSE_SECONDS);
    if (self->is_abandoned) return;
    ucp_worker_destroy(self->worker);
    ucp_cleanup(self->context);
}

/* A worker that still copies can neither be destroyed nor go on: it is abandoned. Without progress it writes no more.
 * Its memory, its descriptors (UCX's own thread uses them), the requests and their buffers stay until the process
 * ends: hardware may know them still. That takes gigabytes that were being received. */
static void worker_end(Worker *self, double seconds) {
    if (self->is_abandoned) return;
    if (self->worker) {
        self->is_busy = 1;
        Py_BEGIN_ALLOW_THREADS
        close_worker(self, seconds);
        Py_END_ALLOW_THREADS
        self->worker = NULL;
    } else if (self->context) {
        ucp_cleanup(self->context);
    }
    self->context = NULL;
    if (self->is_abandoned) return;
    Request *request;
    while ((request = self->pending)) {
        self->pending = request->next;
        if (!request->is_kept && !request->ticket.run) free_request(self, request);
    }
    free_runs(&self->runs.running);
    free_runs(&self->runs.over);
    free_runs(&self->runs.left_over);
    free_spares(&self->runs);
    self->ended = NULL;
    self->ended_end = &self->ended;
    while ((request = self->freed)) {
        self->freed = request->next;
        free(request);
    }
    self->num_freed = 0;
    self->runs.num_peers = 0;
    free(self->peers);
    self->peers = NULL;
    Py_CLEAR(self->failed);
    Py_CLEAR(self->runs.disagreed);
    Py_CLEAR(self->runs.operation_type);
}

static PyObject *worker_close(Worker *self, PyObject *argument) {
    double seconds = PyFloat_AsDouble(argument);
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    if (self->worker) {
        if (!usable(self)) return NULL;
        worker_end(self, seconds);
    }
    Py_RETURN_NONE;
}

static int create(Worker *self, PyObject *settings) {
    void *config, *address;
    size_t size;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) return ucx_failed("ucp_config_read", status), -1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(settings); i++) {
        const char *name, *value;
        if (!PyArg_ParseTuple(PyTuple_GetItem(settings, i), "ss", &name, &value)) return ucp_config_release(config), -1;
        ucp_config_modify(config, name, value); /* what this version does not know, it does not need */
    }
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP};
    status = ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &self->context);
    ucp_config_release(config);
    if (status != UCS_OK) return self->context = NULL, ucx_failed("ucp_init", status), -1;
    ucp_worker_params_t worker = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
    };
    status = ucp_worker_create(self->context, &worker, &self->worker);
    if (status != UCS_OK) return self->worker = NULL, ucx_failed("ucp_worker_create", status), -1;
    status = ucp_worker_get_efd(self->worker, &self->descriptor);
    if (status != UCS_OK) return ucx_failed("ucp_worker_get_efd", status), -1;
    status = ucp_worker_get_address(self->worker, &address, &size);
    if (status != UCS_OK) return ucx_failed("ucp_worker_get_address", status), -1;
    self->address = PyBytes_FromStringAndSize(address, (Py_ssize_t)size);
    ucp_worker_release_address(self->worker, address);
    return self->address ? 0 : -1;
}

static PyObject *worker_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *settings;
    if (!library) return PyErr_SetString(PyExc_RuntimeError, "UCX is not loaded"), NULL;
    if (keywords && PyDict_Size(keywords)) return PyErr_SetString(PyExc_TypeError, "no keywords"), NULL;
    if (!PyArg_ParseTuple(arguments, "O!", &PyTuple_Type, &settings)) return NULL;
    Worker *self = (Worker *)PyType_GenericAlloc(type, 0); /* all zero */
    if (!self) return NULL;
    self->ended_end = &self->ended;
    int is_usual = !getenv("UCX_RNDV_THRESH") && !getenv("UCX_RNDV_SEND_NBR_THRESH");
    self->inside_bytes = is_usual ? INSIDE_BYTES : 0;
    self->headed_inside_bytes = is_usual ? SIZE_MAX : 0;
    if (create(self, settings) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void worker_dealloc(Worker *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    worker_end(self, 0);
    PyErr_Restore(kind, value, traceback);
    Py_CLEAR(self->address);
    if (self->is_abandoned) return; /* UCX knows it still */
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *worker_address(Worker *self, void *unused) {
    (void)unused;
    Py_INCREF(self->address);
    return self->address;
}

static PyObject *worker_fileno(Worker *self, PyObject *unused) {
    (void)unused;
    return usable(self) ? PyLong_FromLong(self->descriptor) : NULL;
}

static PyObject *worker_transports(Worker *self, PyObject *argument) {
    unsigned long peer = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !usable(self)) return NULL;
    PyObject *names = PyList_New(0);
    if (!names || peer >= self->runs.num_peers || !self->peers[peer].endpoint) return names;
    ucp_transport_entry_t entries[MAX_TRANSPORTS] = {{NULL, NULL}};
    ucp_ep_attr_t attributes = {.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS};
    attributes.transports.entries = entries;
    attributes.transports.num_entries = MAX_TRANSPORTS;
    attributes.transports.entry_size = sizeof *entries;
    if (ucp_ep_query(self->peers[peer].endpoint, &attributes) != UCS_OK) return names;
    for (unsigned i = 0; i < attributes.transports.num_entries && entries[i].transport_name; i++) {
        PyObject *name = PyUnicode_FromFormat("%s/%s", entries[i].transport_name, entries[i].device_name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
        if (!names) break;
    }
    return names;
}

/* What a peer that is given up may still read of a send stays until the process ends: the memory of the request, and of
 * the run that it belongs to. */
static void keep(Request *request) {
    Run *run = request->ticket.run;
    if (!run) {
        for (Py_ssize_t i = 0; i < request->num_views; i++) Py_INCREF(request->views[i].obj);
    } else if (!run->is_kept) {
        run->is_kept = 1;
        Py_INCREF(run->own.obj);
        Py_INCREF(run->out.obj);
        Py_INCREF(run->head_object);
        run->scratch = NULL; /* what is in use of it lies at `places` */
    }
}

/* Gives up a peer: all that waits for it ends, and what it may still read of this rank's memory stays. */
static PyObject *worker_lose(Worker *self, PyObject *argument) {
    unsigned long number = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !usable(self)) return NULL;
    if (number >= self->runs.num_peers || number == self->runs.rank)
        return PyErr_SetString(PyExc_ValueError, "no such peer"), NULL;
    Peer *peer = &self->peers[number];
    int is_owed = 0;
    for (Request *request = self->pending; request; request = request->next)
        is_owed |= request->ticket.peer == number && request->ticket.is_send && !request->ticket.has_ended;
    if (is_owed && !give_up_sends_to(self, peer, now() + GIVE_UP_SECONDS))
        for (Request *request = self->pending; request; request = request->next)
            if (request->ticket.peer == number && request->ticket.is_send && !request->ticket.has_ended) keep(request);
    if (!peer->is_lost) lose(self, peer, UCS_ERR_CONNECTION_RESET);
    peer->is_given_up = self->has_newly_lost = 1;
    if (poll_for(self, 0) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef worker_methods[] = {
    {"connect", (PyCFunction)worker_connect, METH_VARARGS, NULL},
    {"send", (PyCFunction)(void (*)(void))worker_send, METH_FASTCALL, NULL},
    {"send_receive", (PyCFunction)(void (*)(void))worker_send_receive, METH_FASTCALL, NULL},
    {"send_receive_value", (PyCFunction)(void (*)(void))worker_send_receive_value, METH_FASTCALL, NULL},
    {"receive", (PyCFunction)(void (*)(void))worker_receive, METH_FASTCALL, NULL},
    {"run", (PyCFunction)(void (*)(void))worker_run, METH_FASTCALL, NULL},
    {"repeat", (PyCFunction)(void (*)(void))worker_repeat, METH_FASTCALL, NULL},
    {"poll", (PyCFunction)worker_poll, METH_O, NULL},
    {"arm", (PyCFunction)worker_arm, METH_NOARGS, NULL},
    {"lose", (PyCFunction)worker_lose, METH_O, NULL},
    {"transports", (PyCFunction)worker_transports, METH_O, NULL},
    {"fileno", (PyCFunction)worker_fileno, METH_NOARGS, NULL},
    {"close", (PyCFunction)worker_close, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef worker_attributes[] = {
    {"address", (getter)worker_address, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot worker_slots[] = {
    {Py_tp_new, worker_new},
    {Py_tp_dealloc, worker_dealloc},
    {Py_tp_methods, worker_methods},
    {Py_tp_getset, worker_attributes},
    {0, NULL},
};

static PyType_Spec worker_spec = {
    .name = "braidax.comm.transports.ucx_binding.Worker",
    .basicsize = sizeof(Worker),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = worker_slots,
};

static PyObject *module_load(PyObject *module, PyObject *path) {
    (void)module;
    if (!library) {
        const char *name = PyUnicode_AsUTF8AndSize(path, NULL);
        if (!name) return NULL;
        void *loaded = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (!loaded) return PyErr_Format(PyExc_OSError, "%s", dlerror());
#define FIND(result, found, parameters) \
    if (!(*(void **)(&found) = dlsym(loaded, #found))) return PyErr_Format(PyExc_OSError, "%s lacks " #found, name);
        UCX_FUNCTIONS(FIND)
        library = loaded;
    }
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    Dl_info info;
    const char *file = dladdr(*(void **)(&ucp_get_version), &info) ? info.dli_fname : "";
    return Py_BuildValue("sIII", file, major, minor, release);
}

static PyMethodDef module_methods[] = {
    {"load", module_load, METH_O, NULL},
    {"know_arrays", module_know_arrays, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "ucx_binding", .m_size = -1, .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit_ucx_binding(void) {
    PyObject *module = PyModule_Create(&module_definition);
    if (!module) return NULL;
    PyObject *type = PyType_FromSpec(&worker_spec), *schedule = PyType_FromSpec(&schedule_spec);
    schedule_type = (PyTypeObject *)schedule; /* stays with the module, which stays */
    if (!type || !schedule || make_names() < 0 || add_repeats(module) < 0 ||
        PyModule_AddObjectRef(module, "Worker", type) < 0 || PyModule_AddObjectRef(module, "Schedule", schedule) < 0)
        Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
