/* Small values: what braidax.comm.small does in Python, where most of the time of a request went.
 *
 * A message of one is a word, what the value begins with, and the value. What it begins with is remembered by functions of
 * Python, which come in a tuple: the type of arrays; what an array of a dtype and shape begins with; what bytes of a length
 * begin with; and what begins so, its bytes, shape and dtype. */

#ifndef BRAIDAX_SMALL_VALUES_H
#define BRAIDAX_SMALL_VALUES_H

#define WORD_BYTES 16
#define LENGTHS_BYTES 24 /* of a value; its first byte is the length of what is behind them, unless that is long */

enum { ARRAY_TYPE, START_OF_ARRAY, START_OF_BYTES, KNOWN, NUM_MEMORIES };

/* An exception that says no more than that Python is to look closer: it is forgotten. Others, such as Ctrl-C, are told. */
static int is_forgotten(void) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return 0;
    PyErr_Clear();
    return 1;
}

/* Returns what a value begins with; None for what is not small, or no such value. */
static PyObject *start_of(PyObject *small, PyObject *value) {
    PyObject *start = NULL;
    if ((PyObject *)Py_TYPE(value) == PyTuple_GetItem(small, ARRAY_TYPE)) {
        PyObject *dtype = PyObject_GetAttr(value, dtype_name), *shape = dtype ? PyObject_GetAttr(value, shape_name) : NULL;
        if (shape) start = PyObject_CallFunctionObjArgs(PyTuple_GetItem(small, START_OF_ARRAY), dtype, shape, NULL);
        Py_XDECREF(dtype);
        Py_XDECREF(shape);
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

/* Returns the value behind a start that is known, NULL for one whose length is another. **Arguments:** `known`: of it. */
static PyObject *made(PyObject *small, PyObject *known, const char *body, Py_ssize_t num_bytes) {
    Py_ssize_t expected = PyLong_AsSsize_t(PyTuple_GetItem(known, 0));
    PyObject *shape = PyTuple_GetItem(known, 1), *dtype = PyTuple_GetItem(known, 2);
    if (expected != num_bytes || PyErr_Occurred()) return NULL;
    PyObject *memory = PyByteArray_FromStringAndSize(body, num_bytes), *value = NULL;
    if (memory && dtype == Py_None) value = PyMemoryView_FromObject(memory);
    else if (memory) value = PyObject_CallFunctionObjArgs(PyTuple_GetItem(small, ARRAY_TYPE), shape, dtype, memory, NULL);
    Py_XDECREF(memory);
    return value;
}

/* Returns the word and the value of a message; a bytearray of one that is not known so. */
static PyObject *word_and_value(PyObject *small, const char *message, Py_ssize_t num_bytes) {
    PyObject *start = NULL, *known = NULL, *value = NULL, *word = NULL, *result = NULL;
    Py_ssize_t begin = num_bytes > WORD_BYTES ? WORD_BYTES + LENGTHS_BYTES + (unsigned char)message[WORD_BYTES] : 0;
    if (begin && begin <= num_bytes) start = PyBytes_FromStringAndSize(message + WORD_BYTES, begin - WORD_BYTES);
    if (start) known = PyObject_CallFunctionObjArgs(PyTuple_GetItem(small, KNOWN), start, NULL);
    if (known) value = made(small, known, message + begin, num_bytes - begin);
    if (value) word = PyBytes_FromStringAndSize(message, WORD_BYTES);
    if (word) result = PyTuple_Pack(2, word, value);
    Py_XDECREF(start);
    Py_XDECREF(known);
    Py_XDECREF(value);
    Py_XDECREF(word);
    if (!result && PyErr_Occurred() && !is_forgotten()) return NULL;
    return result ? result : PyByteArray_FromStringAndSize(message, num_bytes);
}

/* As `send_receive`, of a word and a value each way.
 *
 * **Arguments:** peer, tag of what is sent, its word, its value, tag of what is received, its place, what small values are
 * known by, and the seconds to spin. **Returns:** word and value of what has come; or a bytearray of it; or the operation of
 * the receive; None for a value that is not small, nothing having begun. */
static PyObject *worker_send_receive_value(Worker *self, PyObject *const *arguments, Py_ssize_t count) {
    unsigned peer;
    uint64_t sent, received;
    if (!takes(self, count, 8) || !parse_both(self, arguments, arguments[4], &peer, &sent, &received)) return NULL;
    PyObject *small = arguments[6];
    double seconds = PyFloat_AsDouble(arguments[7]);
    if (seconds == -1 && PyErr_Occurred()) return NULL;
    if (!PyTuple_Check(small) || PyTuple_Size(small) != NUM_MEMORIES)
        return PyErr_Format(PyExc_TypeError, "expected a tuple of %d", NUM_MEMORIES);
    PyObject *start = start_of(small, arguments[3]), *result = NULL;
    if (!start || start == Py_None) return start;
    PyObject *words = PyTuple_Pack(3, arguments[2], start, arguments[3]);
    Py_buffer place;
    if (words && PyObject_GetBuffer(arguments[5], &place, PyBUF_WRITABLE) == 0) {
        Caller caller = {.is_over = 0};
        int failed = send_receive(self, peer, sent, words, received, arguments[5], seconds, &caller);
        result = caller.operation;
        if (!failed && !result) result = word_and_value(small, place.buf, (Py_ssize_t)caller.num_bytes);
        PyBuffer_Release(&place);
    }
    Py_XDECREF(words);
    Py_DECREF(start);
    return result;
}

#endif
