/* Objects of bytes of one length, stacked as rows; included by record_binding.c. */

/* Returns the number of the first object that has another length than a row, or -1. */
static PyObject *stack(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *objects;
    Py_buffer rows;
    Py_ssize_t width, wrong = -1;
    if (!PyArg_ParseTuple(arguments, "O!w*n", &PyList_Type, &objects, &rows, &width)) return NULL;
    Py_ssize_t count = PyList_Size(objects);
    const char **places = PyMem_Calloc((size_t)count + 1, sizeof *places);
    int valid = places && width > 0 && rows.len / width == count && rows.len % width == 0;
    for (Py_ssize_t i = 0; valid && wrong < 0 && i < count; i++) {
        PyObject *object = PyList_GetItem(objects, i);
        valid = PyBytes_Check(object);
        if (!valid) break;
        if (PyBytes_Size(object) != width) wrong = i;
        places[i] = PyBytes_AsString(object);
    }
    if (valid && wrong < 0) {
        PyObject *kept = PyList_GetSlice(objects, 0, count); /* the list may be changed meanwhile */
        valid = kept != NULL;
        if (valid) {
            Py_BEGIN_ALLOW_THREADS
            for (Py_ssize_t i = 0; i < count; i++) memcpy((char *)rows.buf + i * width, places[i], (size_t)width);
            Py_END_ALLOW_THREADS
            Py_DECREF(kept);
        }
    }
    PyMem_Free(places);
    PyBuffer_Release(&rows);
    if (valid) return PyLong_FromSsize_t(wrong);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "expected a list of bytes, and a row for each");
    return NULL;
}
