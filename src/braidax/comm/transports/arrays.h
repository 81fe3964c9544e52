/* The bytes of NumPy's arrays, found where an array has them.
 *
 * What an array begins with is the same for all that was compiled against NumPy since 1.7, and to ask by the protocol of
 * buffers takes as long as to send a small array. Nothing is found so before `know_arrays` has seen an array that lies in
 * memory as is expected here. */

#ifndef BRAIDAX_ARRAYS_H
#define BRAIDAX_ARRAYS_H

#define MAX_DTYPES 16 /* whose sizes are remembered */
#define IS_CONTIGUOUS 0x1u
#define IS_WRITEABLE 0x400u
#define WARNS_OF_WRITES 0x80000000u

typedef struct {
    PyObject_HEAD
    char *data;
    int num_dims;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
} Array;

typedef struct {
    PyObject *dtype;
    Py_ssize_t num_bytes; /* of an element; -1: Python objects are in it */
} DtypeSize;

static PyTypeObject *array_type; /* of no subclass; NULL: arrays are not known */
static DtypeSize dtype_sizes[MAX_DTYPES];
static size_t num_dtype_sizes; /* that have been remembered */

static PyObject *itemsize_name, *hasobject_name;

static int make_array_names(void) {
    itemsize_name = PyUnicode_InternFromString("itemsize");
    hasobject_name = PyUnicode_InternFromString("hasobject");
    return itemsize_name && hasobject_name ? 0 : -1;
}

/* Returns the bytes of an element, or -1; an exception is not left. */
static Py_ssize_t element_bytes(PyObject *dtype) {
    for (size_t i = 0; i < MAX_DTYPES; i++)
        if (dtype_sizes[i].dtype == dtype) return dtype_sizes[i].num_bytes;
    PyObject *size = PyObject_GetAttr(dtype, itemsize_name), *has_objects = size ? PyObject_GetAttr(dtype, hasobject_name) : NULL;
    Py_ssize_t num_bytes = has_objects == Py_False ? PyLong_AsSsize_t(size) : -1;
    Py_XDECREF(size);
    if (!has_objects || PyErr_Occurred()) return Py_XDECREF(has_objects), PyErr_Clear(), -1;
    Py_DECREF(has_objects);
    DtypeSize *place = &dtype_sizes[num_dtype_sizes++ % MAX_DTYPES];
    PyObject *before = place->dtype;
    Py_INCREF(dtype);
    *place = (DtypeSize){dtype, num_bytes};
    Py_XDECREF(before);
    return num_bytes;
}

static const Array *known_array(PyObject *object) {
    return array_type && Py_TYPE(object) == array_type ? (const Array *)object : NULL;
}

/* Fills in a view as the protocol of buffers does for PyBUF_SIMPLE, with PyBUF_WRITABLE or without; returns whether it did. */
static int found_bytes(PyObject *object, Py_buffer *view, int flags) {
    const Array *array = known_array(object);
    if (!array || !((unsigned)array->flags & IS_CONTIGUOUS)) return 0;
    int is_writeable = (unsigned)array->flags & IS_WRITEABLE && !((unsigned)array->flags & WARNS_OF_WRITES);
    Py_ssize_t num_bytes = flags & PyBUF_WRITABLE && !is_writeable ? -1 : element_bytes(array->dtype);
    if (num_bytes < 0) return 0;
    for (int i = 0; i < array->num_dims; i++) num_bytes *= array->shape[i];
    *view = (Py_buffer){.buf = array->data, .obj = object, .len = num_bytes, .itemsize = 1, .readonly = !is_writeable, .ndim = 1};
    Py_INCREF(object);
    return 1;
}

/* As PyObject_GetBuffer. */
static int get_bytes(PyObject *object, Py_buffer *view, int flags) {
    return found_bytes(object, view, flags) ? 0 : PyObject_GetBuffer(object, view, flags);
}

/* **Arguments:** an array of shape [3, 2] that is contiguous and writeable, the address of its data, its dtype.
 * **Returns:** whether arrays are known from now on: this one lies in memory as is expected. */
static PyObject *module_know_arrays(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *object, *dtype;
    unsigned long long address;
    if (!PyArg_ParseTuple(arguments, "OKO", &object, &address, &dtype)) return NULL;
    const Array *array = (const Array *)object;
    unsigned flags = IS_CONTIGUOUS | IS_WRITEABLE;
    int is_expected = (uintptr_t)array->data == address && array->num_dims == 2 && array->shape[0] == 3 &&
                      array->shape[1] == 2 && array->dtype == dtype &&
                      ((unsigned)array->flags & (flags | WARNS_OF_WRITES)) == flags;
    array_type = is_expected ? Py_TYPE(object) : NULL; /* which stays with NumPy */
    return PyBool_FromLong(is_expected);
}

#endif
