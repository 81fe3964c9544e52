/* Objects that hold bytes of one length, stacked as rows; included by record_binding.c. */

/* Returns the number of the first object that has another length than a row, or -1. */
static PyObject *stack(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *objects;
    Py_buffer rows;
    Py_ssize_t width, wrong = -1, held = 0;
    if (!PyArg_ParseTuple(arguments, "O!w*n", &PyList_Type, &objects, &rows, &width)) return NULL;
    Py_ssize_t count = PyList_Size(objects);
    Py_buffer *found = PyMem_Calloc((size_t)count + 1, sizeof *found);
    int valid = found && width > 0 && rows.len / width == count && rows.len % width == 0;
    for (; valid && wrong < 0 && held < count && held < PyList_Size(objects); held++) {
        if (PyObject_GetBuffer(PyList_GetItem(objects, held), &found[held], PyBUF_SIMPLE) < 0) break;
        if (found[held].len != width) wrong = held;
    }
    valid = valid && (wrong >= 0 || held == count);
    if (valid && wrong < 0) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++) memcpy((char *)rows.buf + i * width, found[i].buf, (size_t)width);
        Py_END_ALLOW_THREADS
    }
    while (held) PyBuffer_Release(&found[--held]);
    PyMem_Free(found);
    PyBuffer_Release(&rows);
    if (valid) return PyLong_FromSsize_t(wrong);
    PyErr_SetString(PyExc_ValueError, "expected a list of bytes, and a row for each");
    return NULL;
}
