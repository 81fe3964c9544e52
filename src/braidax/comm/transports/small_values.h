/* Small values: what braidax.comm.small does in Python, where most of the time of a request went.
 *
 * A message of one is a word (a kind and a number, 8 bytes each, the lower ones first), what the value begins with, and the
 * value. What it begins with is remembered by functions of Python, which come in a tuple: one that makes an array of a shape
 * and dtype; what an array of a dtype and shape begins with; what bytes of a length begin with; and what begins so, its bytes,
 * shape and dtype. */

#ifndef BRAIDAX_SMALL_VALUES_H
#define BRAIDAX_SMALL_VALUES_H

#define NUMBER_BYTES 8
#define WORD_BYTES (2 * NUMBER_BYTES)
#define LENGTHS_BYTES 24 /* of a value; its first byte is the length of what is behind them, unless that is long */
#define MAX_STARTS 8     /* that are at hand here, without a call of Python */
#define MAX_START_DIMS 4

enum { EMPTY_ARRAY, START_OF_ARRAY, START_OF_BYTES, KNOWN, NUM_MEMORIES };

typedef struct { /* what arrays of a dtype and shape begin with */
    PyObject *dtype, *start;
    int num_dims;
    Py_ssize_t shape[MAX_START_DIMS];
} StartOfArray;

typedef struct { /* what is known of a start */
    PyObject *start, *known;
} KnownStart;

static PyObject *at_hand; /* the tuple of functions that has told all of this */
static StartOfArray array_starts[MAX_STARTS];
static KnownStart known_starts[MAX_STARTS];
static size_t num_array_starts, num_known_starts; /* that have been remembered */

static void put(PyObject **place, PyObject *object) {
    PyObject *before = *place;
    Py_XINCREF(object);
    *place = object;
    Py_XDECREF(before);
}

static void forget_others(PyObject *small) {
    if (at_hand == small) return;
    put(&at_hand, small);
    for (size_t i = 0; i < MAX_STARTS; i++) {
        put(&array_starts[i].dtype, NULL), put(&array_starts[i].start, NULL);
        put(&known_starts[i].start, NULL), put(&known_starts[i].known, NULL);
    }
}

/* An exception that says no more than that Python is to look closer: it is forgotten. Others, such as Ctrl-C, are told. */
static int is_forgotten(void) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return 0;
    PyErr_Clear();
    return 1;
}

static int is_of(const StartOfArray *place, const Array *array) {
    return place->dtype == array->dtype && place->num_dims == array->num_dims &&
           !memcmp(place->shape, array->shape, (size_t)array->num_dims * sizeof *array->shape);
}

static PyObject *start_of_array(PyObject *small, PyObject *value) {
    const Array *array = known_array(value);
    if (array && array->num_dims > MAX_START_DIMS) array = NULL;
    for (size_t i = 0; array && i < MAX_STARTS; i++) {
        if (!array_starts[i].start || !is_of(&array_starts[i], array)) continue;
        Py_INCREF(array_starts[i].start);
        return array_starts[i].start;
    }
    PyObject *start = NULL, *dtype = PyObject_GetAttr(value, dtype_name), *shape = dtype ? PyObject_GetAttr(value, shape_name) : NULL;
    if (shape) start = PyObject_CallFunctionObjArgs(PyTuple_GetItem(small, START_OF_ARRAY), dtype, shape, NULL);
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    if (array && start && start != Py_None) {
        StartOfArray *place = &array_starts[num_array_starts++ % MAX_STARTS];
        put(&place->dtype, array->dtype), put(&place->start, start);
        place->num_dims = array->num_dims;
        memcpy(place->shape, array->shape, (size_t)array->num_dims * sizeof *array->shape);
    }
    return start;
}

/* Returns what a value begins with; None for what is not small, or no such value. */
static PyObject *start_of(PyObject *small, PyObject *value) {
    PyObject *start = NULL;
    if (known_array(value)) {
        start = start_of_array(small, value);
    } else if (PyBytes_CheckExact(value)) {
        PyObject *size = PyLong_FromSsize_t(PyBytes_Size(value));
        if (size) start = PyObject_CallFunctionObjArgs(PyTuple_GetItem(small, START_OF_BYTES), size, NULL);
        Py_XDECREF(size);
    } else {
        Py_RETURN_NONE;
    }
    if (!start && is_forgotten()) Py_RETURN_NONE;
    return start;
}

/* Returns what is known of a start: NULL, with an exception, for nothing. */
static PyObject *known_of(PyObject *small, const char *start, Py_ssize_t num_bytes) {
    for (size_t i = 0; i < MAX_STARTS; i++) {
        PyObject *other = known_starts[i].start;
        if (!other || PyBytes_Size(other) != num_bytes || memcmp(PyBytes_AsString(other), start, (size_t)num_bytes)) continue;
        Py_INCREF(known_starts[i].known);
        return known_starts[i].known;
    }
    PyObject *bytes = PyBytes_FromStringAndSize(start, num_bytes), *known = NULL;
    if (bytes) known = PyObject_CallFunctionObjArgs(PyTuple_GetItem(small, KNOWN), bytes, NULL);
    if (known) {
        KnownStart *place = &known_starts[num_known_starts++ % MAX_STARTS];
        put(&place->start, bytes), put(&place->known, known);
    }
    Py_XDECREF(bytes);
    return known;
}

/* Returns the array that bytes make; NULL where they make none. */
static PyObject *filled(PyObject *small, PyObject *shape, PyObject *dtype, const char *body, Py_ssize_t num_bytes) {
    PyObject *value = PyObject_CallFunctionObjArgs(PyTuple_GetItem(small, EMPTY_ARRAY), shape, dtype, NULL);
    Py_buffer view;
    if (!value || get_bytes(value, &view, PyBUF_WRITABLE) < 0) return Py_XDECREF(value), NULL;
    int fits = view.len == num_bytes;
    if (fits) memcpy(view.buf, body, (size_t)num_bytes);
    PyBuffer_Release(&view);
    if (!fits) Py_CLEAR(value);
    return value;
}

/* Returns the value behind a start that is known, NULL for one whose length is another. **Arguments:** `known`: of it. */
static PyObject *made(PyObject *small, PyObject *known, const char *body, Py_ssize_t num_bytes) {
    Py_ssize_t expected = PyLong_AsSsize_t(PyTuple_GetItem(known, 0));
    PyObject *shape = PyTuple_GetItem(known, 1), *dtype = PyTuple_GetItem(known, 2);
    if (expected != num_bytes || PyErr_Occurred()) return NULL;
    if (dtype != Py_None) return filled(small, shape, dtype, body, num_bytes);
    PyObject *memory = PyByteArray_FromStringAndSize(body, num_bytes), *value = NULL;
    if (memory) value = PyMemoryView_FromObject(memory);
    Py_XDECREF(memory);
    return value;
}

static void put_number(char *place, uint64_t number) {
    for (int i = 0; i < NUMBER_BYTES; i++) place[i] = (char)(number >> 8 * i);
}

static uint64_t number_at(const char *place) {
    uint64_t number = 0;
    for (int i = 0; i < NUMBER_BYTES; i++) number |= (uint64_t)(unsigned char)place[i] << 8 * i;
    return number;
}

/* Returns kind, number and value of a message; a bytearray of one that is not known so. */
static PyObject *word_and_value(PyObject *small, const char *message, Py_ssize_t num_bytes) {
    PyObject *known = NULL, *value = NULL, *kind = NULL, *number = NULL, *result = NULL;
    Py_ssize_t begin = num_bytes > WORD_BYTES ? WORD_BYTES + LENGTHS_BYTES + (unsigned char)message[WORD_BYTES] : 0;
    if (begin && begin <= num_bytes) known = known_of(small, message + WORD_BYTES, begin - WORD_BYTES);
    if (known) value = made(small, known, message + begin, num_bytes - begin);
    if (value) kind = PyLong_FromUnsignedLongLong(number_at(message));
    if (kind) number = PyLong_FromUnsignedLongLong(number_at(message + NUMBER_BYTES));
    if (number) result = PyTuple_Pack(3, kind, number, value);
    Py_XDECREF(known);
    Py_XDECREF(value);
    Py_XDECREF(kind);
    Py_XDECREF(number);
    if (!result && PyErr_Occurred() && !is_forgotten()) return NULL;
    return result ? result : PyByteArray_FromStringAndSize(message, num_bytes);
}

/* As `send_receive`, of a word and a value each way.
 *
 * **Arguments:** peer, tag of what is sent, kind and number of its word, its value, tag of what is received, its place, what
 * small values are known by, and the seconds to spin. **Returns:** kind, number and value of what has come; or a bytearray of
 * it; or the operation of the receive; None for a value that is not small, nothing having begun. */
static PyObject *worker_send_receive_value(Worker *self, PyObject *const *arguments, Py_ssize_t count) {
    unsigned peer;
    uint64_t sent, received;
    if (!takes(self, count, 9) || !parse_both(self, arguments, arguments[5], &peer, &sent, &received)) return NULL;
    PyObject *small = arguments[7];
    uint64_t kind = PyLong_AsUnsignedLongLong(arguments[2]);
    uint64_t number = kind == (uint64_t)-1 && PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(arguments[3]);
    double seconds = PyErr_Occurred() ? -1 : PyFloat_AsDouble(arguments[8]);
    if (PyErr_Occurred()) return NULL;
    if (!PyTuple_Check(small) || PyTuple_Size(small) != NUM_MEMORIES)
        return PyErr_Format(PyExc_TypeError, "expected a tuple of %d", NUM_MEMORIES);
    forget_others(small);
    PyObject *start = start_of(small, arguments[4]), *result = NULL;
    if (!start || start == Py_None) return start;
    char word[WORD_BYTES];
    put_number(word, kind), put_number(word + NUMBER_BYTES, number);
    Py_buffer views[] = {{.buf = word, .len = WORD_BYTES}, {.buf = PyBytes_AsString(start), .len = PyBytes_Size(start)}, {0}};
    Py_buffer place;
    if (views[1].buf && get_bytes(arguments[4], &views[2], PyBUF_SIMPLE) == 0) {
        if (get_bytes(arguments[6], &place, PyBUF_WRITABLE) == 0) {
            Caller caller = {.is_over = 0};
            int failed = send_receive(self, peer, sent, views, 3, received, arguments[6], seconds, &caller);
            result = caller.operation;
            if (!failed && !result) result = word_and_value(small, place.buf, (Py_ssize_t)caller.num_bytes);
            PyBuffer_Release(&place);
        }
        PyBuffer_Release(&views[2]);
    }
    Py_DECREF(start);
    return result;
}

#endif
