/* Puts rows into parts for braidax.frame.moving.splitting; scatter_binding.pyi says what Python sees of it.
 *
 * The rows are read in their order, and each part is written in its own: so many streams of writing that a core's
 * caches and its TLB hold them, where sorting and gathering would read a row here and a row there. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PARTS 65536

static int same_length(const Py_buffer *one, size_t one_width, const Py_buffer *other, size_t other_width) {
    if ((size_t)one->len % one_width == 0 && (size_t)other->len % other_width == 0 &&
        (size_t)one->len / one_width == (size_t)other->len / other_width)
        return 1;
    PyErr_SetString(PyExc_ValueError, "buffers of other lengths");
    return 0;
}

/* place = hash[16:48] scaled to the ranks, times the buckets, and the highest bits of the hash for the bucket. */
static PyObject *places(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer hashes, places;
    unsigned size, num_buckets;
    if (!PyArg_ParseTuple(arguments, "y*IIw*", &hashes, &size, &num_buckets, &places)) return NULL;
    int valid = same_length(&hashes, 8, &places, 2);
    if (valid && (!size || !num_buckets || num_buckets > MAX_PARTS || size > MAX_PARTS / num_buckets ||
                  (num_buckets & (num_buckets - 1)))) {
        PyErr_SetString(PyExc_ValueError, "expected at most 65536 parts, and a power of two of buckets");
        valid = 0;
    }
    if (valid) {
        const uint64_t *from = hashes.buf;
        uint16_t *to = places.buf;
        size_t num_rows = (size_t)hashes.len / 8;
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < num_rows; i++) {
            uint64_t rank = ((from[i] >> 16 & 0xffffffffu) * size) >> 32;
            to[i] = (uint16_t)(rank * num_buckets + (from[i] >> 48 & (num_buckets - 1)));
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&hashes);
    PyBuffer_Release(&places);
    if (!valid) return NULL;
    Py_RETURN_NONE;
}

#define RUN 8 /* searches at once, so that none waits for what another one loads */

/* The place of each value is the number of splitters, which ascend, that do not follow it. */
static void search(const int64_t *values, size_t num_rows, const int64_t *splitters, size_t num, uint16_t *places) {
    size_t i = 0;
    for (; i + RUN <= num_rows; i += RUN) {
        size_t first[RUN] = {0};
        for (size_t left = num; left > 1; left -= left / 2)
            for (int j = 0; j < RUN; j++)
                first[j] += (left / 2) & -(size_t)(splitters[first[j] + left / 2 - 1] <= values[i + j]);
        for (int j = 0; j < RUN; j++) places[i + j] = (uint16_t)(first[j] + (splitters[first[j]] <= values[i + j]));
    }
    for (; i < num_rows; i++) {
        size_t place = 0;
        while (place < num && splitters[place] <= values[i]) place++;
        places[i] = (uint16_t)place;
    }
}

static PyObject *ranges(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer values, splitters, places;
    if (!PyArg_ParseTuple(arguments, "y*y*w*", &values, &splitters, &places)) return NULL;
    int valid = same_length(&values, 8, &places, 2);
    size_t num = (size_t)splitters.len / 8;
    if (valid && (splitters.len % 8 || !num || num >= MAX_PARTS)) {
        PyErr_SetString(PyExc_ValueError, "expected 1 to 65535 splitters");
        valid = 0;
    }
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        search(values.buf, (size_t)values.len / 8, splitters.buf, num, places.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&splitters);
    PyBuffer_Release(&places);
    if (!valid) return NULL;
    Py_RETURN_NONE;
}

/* Returns whether all places are parts. */
static int count_parts(const uint16_t *places, size_t num_rows, int64_t *counts, size_t num_parts) {
    int64_t *found = calloc(MAX_PARTS, sizeof *found);
    if (!found) return -1;
    for (size_t i = 0; i < num_rows; i++) found[places[i]]++;
    int64_t total = 0;
    for (size_t part = 0; part < num_parts; part++) total += counts[part] = found[part];
    free(found);
    return (size_t)total == num_rows;
}

static PyObject *counts(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer places, counts;
    if (!PyArg_ParseTuple(arguments, "y*w*", &places, &counts)) return NULL;
    int valid = places.len % 2 == 0 && counts.len % 8 == 0 && (size_t)counts.len / 8 <= MAX_PARTS;
    if (!valid) PyErr_SetString(PyExc_ValueError, "expected at most 65536 parts");
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        valid = count_parts(places.buf, (size_t)places.len / 2, counts.buf, (size_t)counts.len / 8);
        Py_END_ALLOW_THREADS
        if (valid < 0) PyErr_NoMemory();
        if (!valid) PyErr_SetString(PyExc_ValueError, "a place of no part");
    }
    PyBuffer_Release(&places);
    PyBuffer_Release(&counts);
    if (valid < 1) return NULL;
    Py_RETURN_NONE;
}

/* Numbers the rows of each part from where it begins. Returns whether all places are parts, and all positions fit. */
static int number(const uint16_t *places, size_t num_rows, int64_t *next, size_t num_parts, uint32_t *positions) {
    for (size_t part = 0; part < num_parts; part++)
        if (next[part] < 0 || (uint64_t)next[part] + num_rows > UINT32_MAX) return 0;
    for (size_t i = 0; i < num_rows; i++) {
        if (places[i] >= num_parts) return 0;
        positions[i] = (uint32_t)next[places[i]]++;
    }
    return 1;
}

static PyObject *positions(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer places, begins, positions;
    if (!PyArg_ParseTuple(arguments, "y*w*w*", &places, &begins, &positions)) return NULL;
    int valid = same_length(&places, 2, &positions, 4);
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        valid = begins.len % 8 == 0 &&
                number(places.buf, (size_t)places.len / 2, begins.buf, (size_t)begins.len / 8, positions.buf);
        Py_END_ALLOW_THREADS
        if (!valid) PyErr_SetString(PyExc_ValueError, "a place of no part, or a position beyond 2**32");
    }
    PyBuffer_Release(&places);
    PyBuffer_Release(&begins);
    PyBuffer_Release(&positions);
    if (!valid) return NULL;
    Py_RETURN_NONE;
}

#define SCATTER(type)                                                             \
    for (size_t i = 0; i < num_rows; i++) {                                       \
        if (to[i] >= length + more) return 0;                                     \
        type *one = to[i] < length ? (type *)out->buf + to[i] : (type *)rest->buf + (to[i] - length); \
        *one = ((const type *)from->buf)[i];                                      \
    }

/* Positions behind the output are those of the rest. Returns whether all are rows of the one or of the other. */
static int move(const Py_buffer *from, const Py_buffer *out, const Py_buffer *rest, const uint32_t *to, size_t num_rows,
                size_t width) {
    size_t length = (size_t)out->len / width, more = (size_t)rest->len / width;
    switch (width) {
        case 1: SCATTER(uint8_t) break;
        case 2: SCATTER(uint16_t) break;
        case 4: SCATTER(uint32_t) break;
        case 8: SCATTER(uint64_t) break;
    }
    return 1;
}

static PyObject *scatter(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer values, positions, out, rest;
    if (!PyArg_ParseTuple(arguments, "y*y*w*w*", &values, &positions, &out, &rest)) return NULL;
    size_t num_rows = (size_t)positions.len / 4, width = num_rows ? (size_t)values.len / num_rows : 1;
    int valid = (width == 1 || width == 2 || width == 4 || width == 8) && (size_t)out.len % width == 0 &&
                (size_t)rest.len % width == 0 && (size_t)values.len == num_rows * width && positions.len % 4 == 0;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        valid = move(&values, &out, &rest, positions.buf, num_rows, width);
        Py_END_ALLOW_THREADS
    }
    if (!valid) PyErr_SetString(PyExc_ValueError, "expected values of 1, 2, 4 or 8 bytes, and a position for each");
    PyBuffer_Release(&values);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&out);
    PyBuffer_Release(&rest);
    if (!valid) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"places", places, METH_VARARGS, NULL},
    {"ranges", ranges, METH_VARARGS, NULL},
    {"counts", counts, METH_VARARGS, NULL},
    {"positions", positions, METH_VARARGS, NULL},
    {"scatter", scatter, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "scatter_binding", .m_size = 0, .m_methods = functions,
};

PyMODINIT_FUNC PyInit_scatter_binding(void) { return PyModule_Create(&module_definition); }
