/* Rows of one length, taken from memory in any order; included by record_binding.c behind padding.h. */

enum { COMING = 4096, LEAST_AHEAD = 2, MOST_AHEAD = 16, ASKED = 512 }; /* bytes on their way; rows; bytes of one that are asked for */

static inline void copy_row(char *to, const char *from, size_t width) {
    if (width == 4) memcpy(to, from, 4); /* what labels have */
    else if (width == 8) memcpy(to, from, 8);
    else memcpy(to, from, width);
}

/* Copies rows, of which number `id` begins `id * unit` bytes behind the first. Returns whether all are in the memory.
 *
 * Rows lie anywhere in memory that no cache holds: while one is copied, the first bytes of those that follow are on their way. */
static int take_each(const char *data, size_t size, size_t unit, const int64_t *ids, size_t count, char *rows, size_t width) {
    size_t ahead = COMING / width;
    ahead = ahead < LEAST_AHEAD ? LEAST_AHEAD : ahead > MOST_AHEAD ? MOST_AHEAD : ahead;
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || size < width || (uint64_t)ids[i] > (size - width) / unit) return 0;
    for (size_t i = 0; i < count; i++) {
        if (i + ahead < count) {
            const char *coming = data + (size_t)ids[i + ahead] * unit;
            for (size_t at = 0; at < width && at < ASKED; at += 64) __builtin_prefetch(coming + at);
        }
        copy_row(rows + i * width, data + (size_t)ids[i] * unit, width);
    }
    return 1;
}

static PyObject *take(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer data, ids, rows;
    Py_ssize_t width, unit; /* bytes of a row, and from a row to the next */
    if (!PyArg_ParseTuple(arguments, "y*y*w*nn", &data, &ids, &rows, &width, &unit)) return NULL;
    size_t count = (size_t)ids.len / 8;
    int valid = width > 0 && unit > 0 && ids.len % 8 == 0 && (size_t)rows.len / (size_t)width == count && rows.len % width == 0;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        valid = take_each(data.buf, (size_t)data.len, (size_t)unit, ids.buf, count, rows.buf, (size_t)width);
        Py_END_ALLOW_THREADS
    }
    if (!valid) PyErr_SetString(PyExc_ValueError, "expected ids of rows that are in the data, and a place for each");
    PyBuffer_Release(&data);
    PyBuffer_Release(&ids);
    PyBuffer_Release(&rows);
    if (!valid) return NULL;
    Py_RETURN_NONE;
}
