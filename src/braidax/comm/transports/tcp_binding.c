/* Moves messages over TCP for braidax.comm.transports.tcp; tcp_binding.pyi says what Python sees of it.
 *
 * A worker has one caller at a time. It moves the frames of its links, most of the time without the GIL; what has ended
 * then is told to Python by its caller, when that holds the GIL again. The sockets are Python's, which closes them after
 * the worker. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <sched.h>

#define BINDING "tcp_binding"
#include "operations.h"
#include "schedules.h"

typedef struct Worker Worker;

#include "tcp_link.h"
#include "tcp_moving.h"

#include "runs.h"

#define MAX_EVENTS 32
#define ROUNDS_PER_EVENTS 8 /* that read the links on which something is waited for, before all are asked */
#define ROUNDS_OF_LANES 64  /* the same where only lanes are waited for, a multiple of it */
#define ROUNDS_WITH_GIL 16  /* of lanes: half a microsecond, shorter than waiting for the GIL may take */

/* Requests */

static Request *new_request(Worker *self, PyObject *operation, unsigned peer, int is_send) {
    Request *request = self->freed;
    if (request) {
        self->freed = request->next;
        self->num_freed--;
    } else if (!(request = malloc(sizeof *request))) {
        return (Request *)PyErr_NoMemory();
    }
    memset(request, 0, offsetof(Request, frame));
    request->ticket.peer = peer;
    request->ticket.is_send = is_send;
    Py_XINCREF(operation);
    request->operation = operation;
    request->views = &request->one;
    request->parts = request->headed;
    request->next = self->pending;
    if (self->pending) self->pending->previous = request;
    self->pending = request;
    return request;
}

static void free_request(Worker *self, Request *request) {
    if (request->previous) request->previous->next = request->next;
    else self->pending = request->next;
    if (request->next) request->next->previous = request->previous;
    for (Py_ssize_t i = 0; i < request->num_views; i++) PyBuffer_Release(&request->views[i]);
    if (request->views != &request->one) free(request->views);
    if (request->parts != request->headed) free(request->parts);
    Py_XDECREF(request->operation);
    if (self->num_freed < MAX_FREE_REQUESTS) {
        request->next = self->freed;
        self->freed = request;
        self->num_freed++;
    } else {
        free(request);
    }
}

static void note_size(Worker *self, Request *request, size_t num_bytes) {
    request->is_large = num_bytes > (request->ticket.is_send ? LARGE_BYTES : LARGE_PLACE_BYTES);
    self->runs.num_large += (size_t)request->is_large;
}

static int tell_error(Worker *self, PyObject *operation, Request *request, size_t capacity) {
    const Link *link = &self->links[request->ticket.peer];
    int status = request->ticket.status;
    PyObject *result = PyObject_CallFunction(self->failed, "OIsKn", operation, request->ticket.peer,
                                             status == LOST ? link->lost_words : status == MUTE ? link->mute_words : "",
                                             (unsigned long long)request->ticket.num_bytes, (Py_ssize_t)capacity);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static int tell_caller(Worker *self, Request *request);

/* Tells Python of what has ended, and lets go of the requests and their buffers. */
static int tell_ended(Worker *self) {
    for (Request *request; (request = self->ended);) {
        if (!(self->ended = request->next_ended)) self->ended_end = &self->ended;
        int failed = request->caller ? tell_caller(self, request) : 0;
        if (request->operation)
            failed |= request->ticket.status ? tell_error(self, request->operation, request, request->capacity)
                                            : finish(request->operation, request->ticket.is_send ? 0 : request->ticket.num_bytes);
        free_request(self, request);
        if (failed) return -1;
    }
    return 0;
}

/* Runs of schedules */

static void post(Worker *self, Request *request) {
    Run *run = request->ticket.run;
    const Step *step = request->ticket.step;
    Link *link = &self->links[step->peer];
    char *data = at(run, &step->to);
    if (request->ticket.is_send) {
        request->parts = request->headed;
        if (step->capacity) request->parts[request->num_parts++] = (struct iovec){(void *)run->head, HEAD_BYTES};
        request->parts[request->num_parts++] = (struct iovec){data, (size_t)step->num_bytes};
        request->left = (size_t)step->num_bytes + (step->capacity ? HEAD_BYTES : 0);
        note_size(self, request, request->left);
        put_send(self, link, request, run->tag);
    } else {
        request->data = data;
        request->capacity = room_of(step);
        note_size(self, request, (size_t)step->num_bytes);
        put_receive(self, link, request, run->tag);
    }
}

static void check_ended(Worker *self, Request *request) {
    (void)self;
    (void)request;
}

static int is_known_still(const Request *request) {
    (void)request;
    return 0;
}

/* Progress */

static int has_news(Worker *self) { return self->ended || self->runs.over; }

static void hush_bell(Worker *self) {
    uint64_t times;
    if (read(self->bell, &times, sizeof times) < 0) return; /* it is silent */
}

/* Moves what links can move of which there is news. */
static unsigned move_ready(Worker *self, int milliseconds) {
    struct epoll_event events[MAX_EVENTS];
    unsigned moved = 0;
    int count = epoll_wait(self->selector, events, MAX_EVENTS, milliseconds);
    for (int i = 0; i < count; i++) {
        Link *link = events[i].data.ptr;
        if (!link) {
            hush_bell(self);
            continue;
        }
        if (link->outgoing && events[i].events & ~(uint32_t)EPOLLIN) {
            flush(self, link);
            moved++;
        }
        if (!(events[i].events & ~(uint32_t)EPOLLOUT)) continue;
        moved += read_link(self, link);
        if (link->lanes.memory) look_for_end(self, link);
    }
    return moved;
}

/* Whether a lane has room that its link waits for, and whether it has something to be read. */
static int is_lane_writable(const Link *link) { return link->outgoing && !is_for_socket(link) && lane_room(&link->lanes); }
static int is_lane_readable(const Link *link) { return !link->is_paused && lane_filled(&link->lanes); }

/* Asks the peers to ring when lanes change. Returns whether nothing has to be done before. */
static int arm_lanes(Worker *self) {
    self->is_armed = self->num_laned > 0;
    for (unsigned i = 0; i < self->num_laned; i++) {
        Link *link = self->laned[i];
        if (link->is_lost) continue;
        if (!link->is_paused) say_asleep(&link->lanes.in.lane->reader_sleeps, 1);
        if (link->outgoing && !is_for_socket(link)) say_asleep(&link->lanes.out.lane->writer_sleeps, 1);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* see wake */
    for (unsigned i = 0; i < self->num_laned; i++) {
        const Link *link = self->laned[i];
        if (!link->is_lost && (is_lane_writable(link) || is_lane_readable(link) || is_lent_here(link))) return 0;
    }
    return 1;
}

static void disarm_lanes(Worker *self) {
    self->is_armed = 0;
    for (unsigned i = 0; i < self->num_laned; i++) {
        say_asleep(&self->laned[i]->lanes.in.lane->reader_sleeps, 0);
        say_asleep(&self->laned[i]->lanes.out.lane->writer_sleeps, 0);
    }
}

/* Moves what can be moved in lanes. */
static unsigned move_lanes(Worker *self) {
    unsigned moved = 0;
    if (self->is_armed) disarm_lanes(self);
    for (unsigned i = 0; i < self->num_laned; i++) {
        Link *link = self->laned[i];
        if (link->is_lost) continue;
        if (is_lane_writable(link)) {
            flush(self, link);
            moved++;
        }
        if (is_lane_readable(link) || (link->message && link->is_outside)) moved += read_link(self, link);
        if (is_lent_here(link)) moved += borrow(self, link);
    }
    return moved;
}

/* Reads the links on which something is waited for. */
static unsigned read_hot(Worker *self) {
    unsigned moved = 0;
    Link *link;
    for (Link **place = &self->hot; (link = *place);) {
        if (link->posted.count || link->asked.count) {
            place = &link->next_hot;
            moved += read_link(self, link);
        } else {
            *place = link->next_hot;
            link->is_hot = 0;
            self->num_hot--;
        }
    }
    return moved;
}

/* Whether nothing is waited for but what comes through lanes, so that the kernel need not be asked each time. */
static int waits_for_lanes(const Worker *self) { return self->num_laned && !self->num_hot && !self->num_blocked; }

static unsigned progress(Worker *self) {
    unsigned moved = self->num_laned ? move_lanes(self) : 0;
    int is_hot = self->num_hot && self->num_hot <= MAX_HOT && !self->num_blocked;
    if (is_hot && ++self->round % ROUNDS_PER_EVENTS) moved += read_hot(self);
    else if (!waits_for_lanes(self) || ++self->round % ROUNDS_OF_LANES == 0) moved += move_ready(self, 0);
    if (self->num_broken) settle_broken(self);
    if (self->runs.running) advance_all(self);
    return moved;
}

static void spin(Worker *self, double seconds) { /* without the GIL */
    int is_quick = waits_for_lanes(self);
    int rounds_per_look = is_quick ? (self->is_crowded ? ROUNDS_WHEN_CROWDED : ROUNDS_PER_LOOK)
                                   : (self->is_crowded ? 1 : ROUNDS_WHEN_CROWDED);
    double begin = now();
    for (int round = 1; !has_news(self); round++) {
        unsigned moved = progress(self);
        if (moved || round % rounds_per_look) continue;
        double passed = now() - begin;
        if (passed >= seconds) break;
        if (self->is_crowded || passed > YIELD_SECONDS) sched_yield();
    }
}

static int poll_for(Worker *self, double seconds) {
    if (!self->runs.num_large || seconds <= 0) {
        if (seconds <= 0) self->round = ROUNDS_OF_LANES - 1; /* all are asked */
        int rounds = seconds > 0 && waits_for_lanes(self) ? ROUNDS_WITH_GIL : 1;
        for (int round = 0; round < rounds && !has_news(self); round++) progress(self);
    }
    if (self->runs.running && seconds > 0 && seconds < RUN_SECONDS) seconds = RUN_SECONDS;
    if (self->runs.num_large && seconds > 0 && seconds < LARGE_SECONDS) seconds = LARGE_SECONDS;
    if (!has_news(self) && seconds > 0) {
        self->is_busy = 1;
        Py_BEGIN_ALLOW_THREADS
        spin(self, seconds);
        Py_END_ALLOW_THREADS
        self->is_busy = 0;
    }
    return tell_ended(self) < 0 || tell_over(self) < 0 || tell_waiting(self) < 0 ? -1 : 0;
}

static int usable(Worker *self) {
    if (self->selector >= 0 && !self->is_busy) return 1;
    PyErr_SetString(PyExc_RuntimeError, self->is_busy ? "TCP has one caller at a time" : "this rank's TCP is closed");
    return 0;
}

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
    return PyBool_FromLong(!has_news(self) && !self->num_broken && arm_lanes(self));
}

/* Sending and receiving */

static int parse_peer(Worker *self, PyObject *const *arguments, unsigned *peer, uint64_t *tag) {
    unsigned long number = PyLong_AsUnsignedLong(arguments[0]);
    *tag = PyLong_AsUnsignedLongLong(arguments[1]);
    if (PyErr_Occurred()) return 0;
    if (number >= self->runs.num_peers || *tag > MAX_TAG)
        return PyErr_SetString(PyExc_ValueError, "no such peer or tag"), 0;
    *peer = (unsigned)number;
    return 1;
}

/* Holds the buffers of a message. */
static int hold(Request *request, PyObject *buffers) {
    PyObject *tuple = PySequence_Tuple(buffers); /* itself, when it is one */
    if (!tuple) return -1;
    Py_ssize_t size = PyTuple_Size(tuple);
    int status = -1;
    if (size > 1) {
        Py_buffer *views = malloc((size_t)size * sizeof *views);
        struct iovec *parts = malloc((size_t)size * sizeof *parts);
        if (!views || !parts) {
            free(views);
            free(parts);
            PyErr_NoMemory();
            goto end;
        }
        request->views = views;
        request->parts = parts;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        Py_buffer *view = &request->views[i];
        if (get_bytes(PyTuple_GetItem(tuple, i), view, PyBUF_SIMPLE) < 0) goto end;
        request->num_views++;
        request->parts[i] = (struct iovec){view->buf, (size_t)view->len};
        request->left += (size_t)view->len;
    }
    request->num_parts = (size_t)size;
    status = 0;
end:
    Py_DECREF(tuple);
    return status;
}

/* Begins what a request asks for, and tells what has ended. */
static PyObject *begun(Worker *self, Link *link, Request *request, uint64_t tag, int is_slow) {
    void (*begin)(Worker *, Link *, Request *, uint64_t) = request->ticket.is_send ? put_send : put_receive;
    if (is_slow) {
        self->is_busy = 1;
        Py_BEGIN_ALLOW_THREADS
        begin(self, link, request, tag);
        Py_END_ALLOW_THREADS
        self->is_busy = 0;
    } else {
        begin(self, link, request, tag);
    }
    if (self->num_broken) settle_broken(self);
    if (self->ended && tell_ended(self) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *begin_send(Worker *self, unsigned peer, uint64_t tag, PyObject *buffers, PyObject *operation) {
    Link *link = &self->links[peer];
    Request *request = new_request(self, operation, peer, 1);
    if (!request) return NULL;
    if (hold(request, buffers) < 0) {
        free_request(self, request);
        return NULL;
    }
    note_size(self, request, request->left);
    return begun(self, link, request, tag, request->is_large || link->is_paused);
}

static PyObject *begin_receive(Worker *self, unsigned peer, uint64_t tag, PyObject *buffer, PyObject *operation,
                               Caller *caller) {
    Link *link = &self->links[peer];
    Request *request = new_request(self, operation, peer, 0);
    if (!request) return NULL;
    request->caller = caller;
    if (get_bytes(buffer, &request->one, PyBUF_WRITABLE) < 0) {
        free_request(self, request);
        return NULL;
    }
    request->num_views = 1;
    request->data = request->one.buf;
    request->capacity = (size_t)request->one.len;
    note_size(self, request, request->capacity);
    return begun(self, link, request, tag, (request->is_large && link->kept.count) || link->is_paused);
}

/* Nothing is sent without a request. */
#define LITTLE_BYTES -1

static int sent_at_once(Worker *self, unsigned peer, uint64_t tag, const char *data, size_t size) {
    (void)self, (void)peer, (void)tag, (void)data, (void)size;
    return 0;
}

#include "calls.h"

/* Beginning and end */

/* **Arguments:** `lanes`: the descriptor of the memory and the bell of the peer; None for a link without. */
static int add_lanes(Worker *self, Link *link, PyObject *lanes) {
    int memory, bell;
    if (lanes == Py_None) return 0;
    if (!PyTuple_Check(lanes) || !PyArg_ParseTuple(lanes, "ii", &memory, &bell)) return -1;
    expect_loans(link);
    if (open_lanes(&link->lanes, memory, self->runs.rank < link->rank, bell) < 0)
        return PyErr_SetFromErrno(PyExc_OSError), -1;
    self->laned[self->num_laned++] = link;
    return 0;
}

/* Makes room for links with lanes, and listens to the bell. */
static int expect_lanes(Worker *self, PyObject *lanes, Py_ssize_t size) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (PyTuple_Size(lanes) != size) return PyErr_SetString(PyExc_ValueError, "not as many lanes as ranks"), -1;
    if (!(self->laned = calloc((size_t)size, sizeof *self->laned))) return PyErr_NoMemory(), -1;
    if (self->bell >= 0 && epoll_ctl(self->selector, EPOLL_CTL_ADD, self->bell, &event) < 0)
        return PyErr_SetFromErrno(PyExc_OSError), -1;
    return 0;
}

static int add_link(Worker *self, unsigned rank, PyObject *number) {
    Link *link = &self->links[rank];
    long descriptor = PyLong_AsLong(number);
    if (descriptor == -1 && PyErr_Occurred()) return -1;
    link->descriptor = (int)descriptor;
    link->rank = rank;
    link->room = KEEP_BYTES;
    link->last = &link->outgoing;
    if (descriptor >= 0 && !(link->stage = malloc(STAGE_BYTES))) return PyErr_NoMemory(), -1;
    watch(self, link);
    if (descriptor >= 0 && !link->watched) return PyErr_SetFromErrno(PyExc_OSError), -1;
    return 0;
}

static PyObject *worker_connect(Worker *self, PyObject *arguments) {
    unsigned long long rank;
    int is_crowded;
    PyObject *descriptors, *failed, *disagreed, *operation_type, *lanes = NULL;
    if (!usable(self) || !PyArg_ParseTuple(arguments, "KO!OOOp|O!i", &rank, &PyTuple_Type, &descriptors, &failed, &disagreed,
                                           &operation_type, &is_crowded, &PyTuple_Type, &lanes, &self->bell)) return NULL;
    Py_ssize_t size = PyTuple_Size(descriptors);
    if (self->links || rank >= (unsigned long long)size || size > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "cannot connect to %zd peers", size);
    if (!(self->links = calloc((size_t)size, sizeof *self->links))) return PyErr_NoMemory();
    Py_INCREF(failed);
    Py_INCREF(disagreed);
    Py_INCREF(operation_type);
    self->failed = failed;
    self->runs.disagreed = disagreed;
    self->runs.operation_type = operation_type;
    self->runs.rank = rank;
    self->is_crowded = is_crowded;
    if (lanes && expect_lanes(self, lanes, size) < 0) return NULL;
    for (Py_ssize_t i = 0; i < size; i++) {
        if (add_link(self, (unsigned)i, PyTuple_GetItem(descriptors, i)) < 0) return NULL;
        self->runs.num_peers++;
        if (lanes && add_lanes(self, &self->links[i], PyTuple_GetItem(lanes, i)) < 0) return NULL;
    }
    Py_RETURN_NONE;
}

static int is_unsent(const Worker *self) {
    for (unsigned i = 0; i < self->runs.num_peers; i++)
        if (self->links[i].outgoing || self->links[i].offered.count) return 1;
    return 0;
}

static void say_goodbye(Worker *self, Link *link) {
    Frame *frame = link->descriptor < 0 || link->is_lost || link->is_mute ? NULL : new_frame(self);
    if (!frame) return;
    int is_idle = !link->outgoing;
    frame->request = NULL;
    head_frame(link, frame, BYE, 0, 0, 0, 0);
    queue_last(link, frame);
    if (is_idle) flush(self, link);
}

static void deliver(Worker *self, double deadline) { /* without the GIL */
    for (unsigned i = 0; i < self->runs.num_peers; i++) say_goodbye(self, &self->links[i]);
    for (;;) {
        if (self->num_broken) settle_broken(self);
        double left = deadline - now();
        if (!is_unsent(self) || left <= 0) return;
        int milliseconds = left > 1000 ? 1000000 : (int)(1000 * left) + 1;
        move_ready(self, arm_lanes(self) ? milliseconds : 0);
        move_lanes(self);
    }
}

static void free_link(Worker *self, Link *link) {
    for (Frame *frame; (frame = link->outgoing);) {
        link->outgoing = frame->next;
        if (!frame->request) free_frame(self, frame);
    }
    if (link->message && link->message->is_taken && !link->message->is_offered) free_message(self, link->message);
    for (Item *item; (item = take_any(&link->kept));) free_message(self, OF(Message, item, item));
    for (Item *item; (item = take_any(&link->asked));) free_message(self, OF(Message, item, item));
    free_table(&link->offered);
    free_table(&link->posted);
    free_table(&link->kept);
    free_table(&link->asked);
    free(link->stage);
    close_lanes(&link->lanes);
}

/* From here on nothing touches the sockets or a buffer. */
static void worker_end(Worker *self) {
    for (unsigned i = 0; i < self->num_laned; i++) withdraw(&self->laned[i]->lanes);
    if (self->selector >= 0) close(self->selector);
    self->selector = -1;
    for (unsigned i = 0; i < self->runs.num_peers; i++) free_link(self, &self->links[i]);
    self->runs.num_peers = 0;
    free(self->links);
    self->links = self->hot = NULL;
    free(self->laned);
    self->laned = NULL;
    self->num_laned = 0;
    self->ended = NULL;
    self->ended_end = &self->ended;
    while (self->pending) free_request(self, self->pending);
    free_runs(&self->runs.running);
    free_runs(&self->runs.over);
    free_runs(&self->runs.left_over);
    free_spares(&self->runs);
    for (Request *request; (request = self->freed); free(request)) self->freed = request->next;
    for (Frame *frame; (frame = self->free_frames); free(frame)) self->free_frames = frame->next;
    for (Message *message; (message = self->free_messages); free(message))
        self->free_messages = (Message *)message->item.next;
    self->num_freed = self->num_free_frames = self->num_free_messages = 0;
    free(self->dropped);
    self->dropped = NULL;
    Py_CLEAR(self->failed);
    Py_CLEAR(self->runs.disagreed);
    Py_CLEAR(self->runs.operation_type);
}

static PyObject *worker_close(Worker *self, PyObject *argument) {
    double seconds = PyFloat_AsDouble(argument);
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    PyObject *ranks = PyList_New(0);
    if (!ranks || self->selector < 0) return ranks;
    if (!usable(self)) return Py_DECREF(ranks), NULL;
    int failed = 0;
    if (seconds > 0) {
        self->is_busy = 1;
        Py_BEGIN_ALLOW_THREADS
        deliver(self, now() + seconds);
        Py_END_ALLOW_THREADS
        self->is_busy = 0;
        failed = tell_ended(self);
    }
    for (unsigned i = 0; !failed && i < self->runs.num_peers; i++) {
        if (self->links[i].descriptor < 0 || self->links[i].is_lost) continue;
        PyObject *rank = PyLong_FromUnsignedLong(i);
        failed = !rank || PyList_Append(ranks, rank) < 0;
        Py_XDECREF(rank);
    }
    if (failed) Py_CLEAR(ranks);
    worker_end(self);
    return ranks;
}

static PyObject *worker_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    if ((keywords && PyDict_Size(keywords)) || PyTuple_Size(arguments))
        return PyErr_SetString(PyExc_TypeError, "no arguments"), NULL;
    Worker *self = (Worker *)PyType_GenericAlloc(type, 0); /* all zero */
    if (!self) return NULL;
    self->ended_end = &self->ended;
    self->bell = -1;
    self->selector = epoll_create1(EPOLL_CLOEXEC);
    if (self->selector < 0 || !(self->dropped = malloc(STAGE_BYTES))) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void worker_dealloc(Worker *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject *kind, *value, *traceback;
    PyErr_Fetch(&kind, &value, &traceback);
    worker_end(self);
    PyErr_Restore(kind, value, traceback);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *worker_fileno(Worker *self, PyObject *unused) {
    (void)unused;
    return usable(self) ? PyLong_FromLong(self->selector) : NULL;
}

/* What is kept of messages from a peer that nobody has asked for. */
static PyObject *worker_kept_bytes(Worker *self, PyObject *argument) {
    unsigned long peer = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !usable(self)) return NULL;
    size_t num_bytes = 0;
    if (peer >= self->runs.num_peers) return PyErr_SetString(PyExc_ValueError, "no such peer"), NULL;
    const Link *link = &self->links[peer];
    for (size_t i = 0; i < link->kept.num_buckets; i++)
        for (Item *item = link->kept.first[i]; item; item = item->next) {
            const Message *message = OF(Message, item, item);
            if (message->charge > ENTRY_BYTES) num_bytes += message->charge - ENTRY_BYTES;
        }
    return PyLong_FromSize_t(num_bytes);
}

/* Gives up a peer: all that waits for it ends, and nothing that it sent before is kept. */
static PyObject *worker_lose(Worker *self, PyObject *argument) {
    unsigned long peer = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred() || !usable(self)) return NULL;
    if (peer >= self->runs.num_peers || peer == self->runs.rank) return PyErr_SetString(PyExc_ValueError, "no such peer"), NULL;
    Link *link = &self->links[peer];
    lose(self, link, "", GIVEN_UP);
    for (Item *item; (item = take_any(&link->kept));) free_message(self, OF(Message, item, item));
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
    {"fileno", (PyCFunction)worker_fileno, METH_NOARGS, NULL},
    {"kept_bytes", (PyCFunction)worker_kept_bytes, METH_O, NULL},
    {"lose", (PyCFunction)worker_lose, METH_O, NULL},
    {"close", (PyCFunction)worker_close, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot worker_slots[] = {
    {Py_tp_new, worker_new},
    {Py_tp_dealloc, worker_dealloc},
    {Py_tp_methods, worker_methods},
    {0, NULL},
};

static PyType_Spec worker_spec = {
    .name = "braidax.comm.transports.tcp_binding.Worker",
    .basicsize = sizeof(Worker),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = worker_slots,
};

static PyMethodDef module_methods[] = {
    {"know_arrays", module_know_arrays, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "tcp_binding", .m_size = -1, .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit_tcp_binding(void) {
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
