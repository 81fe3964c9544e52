/* What Python calls to send and to receive.
 *
 * Who includes this has functions `begin_send` and `begin_receive`, which return None or raise, `parse_peer`, `usable`
 * and `poll_for`; and `sent_at_once`, which is tried with up to LITTLE_BYTES, and returns whether it has sent them without
 * looking at them any more. */

#ifndef BRAIDAX_CALLS_H
#define BRAIDAX_CALLS_H

static int takes(Worker *self, Py_ssize_t count, Py_ssize_t expected) {
    if (!usable(self)) return 0;
    if (count != expected) return PyErr_Format(PyExc_TypeError, "expected %zd arguments", expected), 0;
    return 1;
}

/* Spins for an operation that has begun, unless that is over; lets go of the result of its beginning on an error. */
static PyObject *spun(Worker *self, PyObject *result, PyObject *operation, double seconds) {
    if (!result || seconds < 0) return result;
    PyObject *done = PyObject_GetAttr(operation, done_name);
    int failed = !done || (done != Py_True && poll_for(self, seconds) < 0);
    Py_XDECREF(done);
    if (failed) Py_CLEAR(result);
    return result;
}

/* Both: **Arguments:** peer, tag, buffers or buffer, operation; and for how long to spin, not at all by default. */
static PyObject *begin(Worker *self, PyObject *const *arguments, Py_ssize_t count, int is_send) {
    unsigned peer;
    uint64_t tag;
    if (!takes(self, count, count == 5 ? 5 : 4) || !parse_peer(self, arguments, &peer, &tag)) return NULL;
    double seconds = count == 5 ? PyFloat_AsDouble(arguments[4]) : -1;
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    PyObject *result = is_send ? begin_send(self, peer, tag, arguments[2], arguments[3])
                               : begin_receive(self, peer, tag, arguments[2], arguments[3], NULL);
    return spun(self, result, arguments[3], seconds);
}

static PyObject *worker_send(Worker *self, PyObject *const *arguments, Py_ssize_t count) {
    return begin(self, arguments, count, 1);
}

static PyObject *worker_receive(Worker *self, PyObject *const *arguments, Py_ssize_t count) {
    return begin(self, arguments, count, 0);
}

static void put_together(char *end, const Py_buffer *views, Py_ssize_t num_views) {
    for (Py_ssize_t i = 0; i < num_views; i++) {
        if (views[i].len) memcpy(end, views[i].buf, (size_t)views[i].len);
        end += views[i].len;
    }
}

/* Sends a copy of the concatenation of buffers. */
static int send_views(Worker *self, unsigned peer, uint64_t tag, const Py_buffer *views, Py_ssize_t num_views) {
    char little[LITTLE_BYTES + 1];
    Py_ssize_t num_bytes = 0;
    for (Py_ssize_t i = 0; i < num_views; i++) num_bytes += views[i].len;
    if (num_bytes <= LITTLE_BYTES) {
        put_together(little, views, num_views);
        if (sent_at_once(self, peer, tag, little, (size_t)num_bytes)) return 0;
    }
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, num_bytes), *tuple = bytes ? PyTuple_Pack(1, bytes) : NULL;
    if (tuple) put_together(PyBytes_AsString(bytes), views, num_views);
    PyObject *begun = tuple ? begin_send(self, peer, tag, tuple, NULL) : NULL;
    Py_XDECREF(bytes);
    Py_XDECREF(tuple);
    Py_XDECREF(begun);
    return begun ? 0 : -1;
}

static void release_views(Py_buffer *views, Py_ssize_t num_views) {
    for (Py_ssize_t i = 0; i < num_views; i++) PyBuffer_Release(&views[i]);
}

/* Gets the bytes of a tuple of buffers, at most MAX_JOINED. Returns how many there are, or -1. */
static Py_ssize_t get_views(PyObject *buffers, Py_buffer *views) {
    Py_ssize_t size = PyTuple_Check(buffers) ? PyTuple_Size(buffers) : -1, num_views = 0;
    if (size < 0 || size > MAX_JOINED)
        return PyErr_Format(PyExc_TypeError, "expected a tuple of at most %d buffers", MAX_JOINED), -1;
    while (num_views < size && get_bytes(PyTuple_GetItem(buffers, num_views), &views[num_views], PyBUF_SIMPLE) == 0) num_views++;
    if (num_views == size) return size;
    release_views(views, num_views);
    return -1;
}

static int tell_caller(Worker *self, Request *request) {
    Caller *caller = request->caller;
    caller->is_over = 1;
    caller->num_bytes = request->ticket.num_bytes;
    if (!request->ticket.status) return request->caller = NULL, 0;
    return make_operation(self, &request->operation, &request->caller, request->ticket.peer);
}

/* The receive of a caller that has not ended, if there is one, goes on without it. **Arguments:** `failed`: as it
 * returns, so far. */
static int leave_receive(Worker *self, Caller *caller, int failed) {
    Request *request = self->pending;
    while (request && request->caller != caller) request = request->next;
    if (request && failed) request->caller = NULL;
    else if (request) failed = make_operation(self, &request->operation, &request->caller, request->ticket.peer) < 0;
    return failed;
}

/* Sends a copy of a small message, receives another one from the same peer into a place, and spins for that, not at all
 * for -1 seconds. Returns whether that failed; otherwise the caller is over, or has the operation of the receive. */
static int send_receive(Worker *self, unsigned peer, uint64_t sent, const Py_buffer *views, Py_ssize_t num_views,
                        uint64_t received, PyObject *place, double seconds, Caller *caller) {
    int is_sent = send_views(self, peer, sent, views, num_views) == 0;
    PyObject *begun = is_sent ? begin_receive(self, peer, received, place, NULL, caller) : NULL;
    int failed = !begun || (!caller->is_over && seconds >= 0 && poll_for(self, seconds) < 0);
    if (!caller->is_over) failed = leave_receive(self, caller, failed);
    Py_XDECREF(begun);
    if (failed) Py_CLEAR(caller->operation);
    return failed;
}

static int parse_both(Worker *self, PyObject *const *arguments, PyObject *back, unsigned *peer, uint64_t *sent,
                      uint64_t *received) {
    PyObject *const other[2] = {arguments[0], back};
    return parse_peer(self, arguments, peer, sent) && parse_peer(self, other, peer, received);
}

/* **Arguments:** peer, tag of what is sent, buffers, tag of what is received, its place, and the seconds to spin.
 * **Returns:** what has come, a bytearray; or else the operation of the receive. */
static PyObject *worker_send_receive(Worker *self, PyObject *const *arguments, Py_ssize_t count) {
    unsigned peer;
    uint64_t sent, received;
    if (!takes(self, count, 6) || !parse_both(self, arguments, arguments[3], &peer, &sent, &received)) return NULL;
    double seconds = PyFloat_AsDouble(arguments[5]);
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    Py_buffer place;
    if (get_bytes(arguments[4], &place, PyBUF_WRITABLE) < 0) return NULL;
    Py_buffer views[MAX_JOINED];
    Py_ssize_t num_views = get_views(arguments[2], views);
    PyObject *result = NULL;
    if (num_views >= 0) {
        Caller caller = {.is_over = 0};
        int failed = send_receive(self, peer, sent, views, num_views, received, arguments[4], seconds, &caller);
        result = caller.operation;
        if (!failed && !result) result = PyByteArray_FromStringAndSize(place.buf, (Py_ssize_t)caller.num_bytes);
        release_views(views, num_views);
    }
    PyBuffer_Release(&place);
    return result;
}

#include "repeats.h"
#include "small_values.h"

#endif
