/* Rows of one length, taken from memory in any order; included by record_binding.c behind padding.h. */

enum { COMING = 8192, LEAST_AHEAD = 2, MOST_AHEAD = 32, ASKED = 4096 }; /* bytes on their way; rows; bytes of one that are asked for */
enum { TO_SECOND_CACHE = 2 }; /* which can wait for more lines at a time than the first, and has room for them */
enum { LINE = 64, STREAMED = 4 << 20 }; /* bytes of a cache's line; of rows that are written past the caches, from so many on */

typedef void (*copy_of)(char *to, const char *from, size_t width);

static inline void copy_row(char *to, const char *from, size_t width) {
    if (width == 4) memcpy(to, from, 4); /* what labels have */
    else if (width == 8) memcpy(to, from, 8);
    else memcpy(to, from, width);
}

/* Copies rows, of which number `id` begins `id * unit` bytes behind the first.
 *
 * Rows lie anywhere in memory that no cache holds: while one is copied, those that follow are on their way. */
static inline __attribute__((always_inline)) void take_by(copy_of copy, const char *data, size_t unit, const int64_t *ids, size_t count,
                                                          char *rows, size_t width) {
    size_t ahead = COMING / width;
    ahead = ahead < LEAST_AHEAD ? LEAST_AHEAD : ahead > MOST_AHEAD ? MOST_AHEAD : ahead;
    for (size_t i = 0; i < count; i++) {
        if (i + ahead < count) {
            const char *coming = data + (size_t)ids[i + ahead] * unit;
            for (size_t at = 0; at < width && at < ASKED; at += LINE) __builtin_prefetch(coming + at, 0, TO_SECOND_CACHE);
        }
        copy(rows + i * width, data + (size_t)ids[i] * unit, width);
    }
}

#ifdef HAS_INSTRUCTION
__attribute__((target("avx2"))) static inline void stream_row(char *to, const char *from, size_t width) {
    for (size_t at = 0; at < width; at += LINE) {
        __m256i one = _mm256_loadu_si256((const __m256i *)(from + at)), other = _mm256_loadu_si256((const __m256i *)(from + at) + 1);
        _mm256_stream_si256((__m256i *)(to + at), one);
        _mm256_stream_si256((__m256i *)(to + at) + 1, other);
    }
}

/* What is larger than the caches is written past them: a write through them first reads what it replaces, and they keep what the
 * threads need that use the rows. */
__attribute__((target("avx2"))) static void take_streamed(const char *data, size_t unit, const int64_t *ids, size_t count, char *rows,
                                                          size_t width) {
    take_by(stream_row, data, unit, ids, count, rows, width);
    _mm_sfence();
}

static int is_streamed(const char *rows, size_t count, size_t width) {
    return count * width >= STREAMED && width % LINE == 0 && (uintptr_t)rows % LINE == 0 && __builtin_cpu_supports("avx2");
}
#endif

/* Returns whether all rows are in the memory. */
static int take_each(const char *data, size_t size, size_t unit, const int64_t *ids, size_t count, char *rows, size_t width) {
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || size < width || (uint64_t)ids[i] > (size - width) / unit) return 0;
#ifdef HAS_INSTRUCTION
    if (is_streamed(rows, count, width)) {
        take_streamed(data, unit, ids, count, rows, width);
        return 1;
    }
#endif
    take_by(copy_row, data, unit, ids, count, rows, width);
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
