/* Moves rows of tables for braidax.parallel.served.row_memory; rows_binding.pyi says what Python sees of it.
 *
 * Rows lie anywhere in a table that no cache holds: while one is copied, the ones that follow are on their way. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The same numbers whatever the processor has: no sum of products is rounded once where another rounds it twice. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

#define AHEAD 12     /* rows that are on their way */
#define LINE 64      /* bytes of a cache line */
#define MOST_LINES 8 /* of a row that are asked for; the hardware brings what follows */

static inline void ask_for(const char *row, size_t width, int to_write) {
    size_t end = width < MOST_LINES * LINE ? width : MOST_LINES * LINE;
    for (size_t at = 0; at < end; at += LINE) {
        if (to_write) __builtin_prefetch(row + at, 1);
        else __builtin_prefetch(row + at, 0);
    }
}

static inline void copy(char *to, const char *from, size_t width) {
    if (width == 4) memcpy(to, from, 4); /* what optimizers keep of a row */
    else if (width == 8) memcpy(to, from, 8);
    else memcpy(to, from, width);
}

/* Copies rows from the table, or to it. Returns whether all ids are of its rows. */
static int move(char *table, size_t num_rows, const int64_t *ids, size_t count, char *rows, size_t width, int to_table) {
    for (size_t i = 0; i < count; i++)
        if ((uint64_t)ids[i] >= num_rows) return 0;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) ask_for(table + (size_t)ids[i + AHEAD] * width, width, to_table);
        char *one = table + (size_t)ids[i] * width;
        if (to_table) copy(one, rows + i * width, width);
        else copy(rows + i * width, one, width);
    }
    return 1;
}

static PyObject *moved(PyObject *arguments, const char *format, int to_table) {
    Py_buffer table, ids, rows;
    unsigned width; /* bytes of a row */
    if (!PyArg_ParseTuple(arguments, format, &table, &ids, &rows, &width)) return NULL;
    size_t count = (size_t)ids.len / 8;
    int valid = width && ids.len % 8 == 0 && (size_t)rows.len == count * width && (size_t)table.len % width == 0;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        valid = move(table.buf, (size_t)table.len / width, ids.buf, count, rows.buf, width, to_table);
        Py_END_ALLOW_THREADS
    }
    if (!valid) PyErr_SetString(PyExc_ValueError, "expected a row for each id, and ids of rows of the table");
    PyBuffer_Release(&table);
    PyBuffer_Release(&ids);
    PyBuffer_Release(&rows);
    if (!valid) return NULL;
    Py_RETURN_NONE;
}

static PyObject *take(PyObject *self, PyObject *arguments) {
    (void)self;
    return moved(arguments, "y*y*w*I", 0);
}

static PyObject *put(PyObject *self, PyObject *arguments) {
    (void)self;
    return moved(arguments, "w*y*y*I", 1);
}

/* Adds some numbers of each row, [first, end), to those of its sum, row by row. Returns whether all slots are of sums.
 *
 * A sum begins as 0 and its first row, which is not that row where it has a -0. Which have begun `begun` says. */
#define SUM(type)                                                                                              \
    WIDE static int sum_##type(const type *rows, const int32_t *slots, size_t count, type *sums, size_t num_sums,   \
                          size_t width, size_t first, size_t end, char *begun) {                               \
        size_t num = end - first, bytes = num * sizeof(type);                                                  \
        rows += first;                                                                                         \
        sums += first;                                                                                         \
        for (size_t i = 0; i < count; i++) {                                                                   \
            size_t slot = (uint32_t)slots[i], coming = i + AHEAD < count ? (uint32_t)slots[i + AHEAD] : 0;      \
            if (slot >= num_sums) return 0;                                                                    \
            if (coming < num_sums) ask_for((const char *)(sums + coming * width), bytes, 1);                   \
            if (i + AHEAD < count) ask_for((const char *)(rows + (i + AHEAD) * width), bytes, 0);              \
            type *restrict sum = sums + slot * width;                                                          \
            const type *restrict row = rows + i * width;                                                       \
            if (begun[slot])                                                                                   \
                for (size_t at = 0; at < num; at++) sum[at] += row[at];                                        \
            else                                                                                               \
                for (size_t at = 0; at < num; at++) sum[at] = (type)0 + row[at];                               \
            begun[slot] = 1;                                                                                   \
        }                                                                                                      \
        for (size_t i = 0; i < num_sums; i++)                                                                  \
            if (!begun[i]) memset(sums + i * width, 0, bytes);                                                 \
        return 1;                                                                                              \
    }

SUM(float)
SUM(double)

static PyObject *sum(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer rows, slots, sums;
    unsigned width, size, first, end; /* numbers in a row, bytes of one, and which are this call's */
    if (!PyArg_ParseTuple(arguments, "y*y*w*IIII", &rows, &slots, &sums, &width, &size, &first, &end)) return NULL;
    size_t count = (size_t)slots.len / 4, bytes = (size_t)width * size;
    int valid = bytes && (size == 4 || size == 8) && slots.len % 4 == 0 && (size_t)rows.len == count * bytes &&
                (size_t)sums.len % bytes == 0 && first <= end && end <= width;
    size_t num_sums = valid ? (size_t)sums.len / bytes : 0;
    char *begun = valid ? calloc(num_sums ? num_sums : 1, 1) : NULL;
    if (begun) {
        Py_BEGIN_ALLOW_THREADS
        valid = size == 4 ? sum_float(rows.buf, slots.buf, count, sums.buf, num_sums, width, first, end, begun)
                          : sum_double(rows.buf, slots.buf, count, sums.buf, num_sums, width, first, end, begun);
        Py_END_ALLOW_THREADS
        free(begun);
    } else if (valid) PyErr_NoMemory();
    if (!valid) PyErr_SetString(PyExc_ValueError, "expected a row of 4 or 8 byte numbers for each slot, and slots of sums");
    PyBuffer_Release(&rows);
    PyBuffer_Release(&slots);
    PyBuffer_Release(&sums);
    if (!valid || !begun) return NULL;
    Py_RETURN_NONE;
}

#define LANES 16 /* sums of squares side by side, which are added in a fixed order */

/* Moves rows [first, end) of `ids` by row-wise Adagrad. Returns whether all ids are of the table's rows. */
WIDE static int move_by_adagrad(float *table, float *kept, int64_t *touched, size_t num_rows, const int64_t *ids,
                                const float *gradients, size_t width, float rate, float eps, int64_t step, size_t first,
                                size_t end) {
    for (size_t i = first; i < end; i++)
        if ((uint64_t)ids[i] >= num_rows) return 0;
    for (size_t i = first; i < end; i++) {
        if (i + AHEAD < end) {
            size_t coming = (size_t)ids[i + AHEAD];
            ask_for((const char *)(table + coming * width), width * sizeof(float), 1);
            __builtin_prefetch(kept + coming, 1);
            __builtin_prefetch(touched + coming, 1);
        }
        size_t id = (size_t)ids[i], at = 0;
        const float *restrict gradient = gradients + i * width;
        float *restrict row = table + id * width, lanes[LANES] = {0}, squares = 0;
        for (; at + LANES <= width; at += LANES)
            for (size_t lane = 0; lane < LANES; lane++) lanes[lane] += gradient[at + lane] * gradient[at + lane];
        for (; at < width; at++) lanes[at % LANES] += gradient[at] * gradient[at];
        for (size_t lane = 0; lane < LANES; lane++) squares += lanes[lane];
        kept[id] += squares / (float)width;
        touched[id] = step;
        float scale = -rate * (1 / sqrtf(kept[id] + eps));
        for (at = 0; at < width; at++) row[at] += gradient[at] * scale;
    }
    return 1;
}

static PyObject *adagrad(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer table, kept, touched, ids, gradients;
    unsigned width; /* numbers in a row */
    float rate, eps;
    long long step;
    Py_ssize_t first, end;
    if (!PyArg_ParseTuple(arguments, "w*w*w*y*y*IffLnn", &table, &kept, &touched, &ids, &gradients, &width, &rate, &eps,
                          &step, &first, &end))
        return NULL;
    size_t bytes = (size_t)width * sizeof(float), count = (size_t)ids.len / 8;
    int valid = width && (size_t)table.len % bytes == 0 && ids.len % 8 == 0 &&
                (size_t)gradients.len == count * bytes && 0 <= first && first <= end && (size_t)end <= count;
    size_t num_rows = valid ? (size_t)table.len / bytes : 0;
    valid = valid && (size_t)kept.len == num_rows * sizeof(float) && (size_t)touched.len == num_rows * sizeof(int64_t);
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        valid = move_by_adagrad(table.buf, kept.buf, touched.buf, num_rows, ids.buf, gradients.buf, width, rate, eps,
                                step, (size_t)first, (size_t)end);
        Py_END_ALLOW_THREADS
    }
    if (!valid) PyErr_SetString(PyExc_ValueError, "expected a gradient for each id, and ids of rows of the table");
    PyBuffer_Release(&table);
    PyBuffer_Release(&kept);
    PyBuffer_Release(&touched);
    PyBuffer_Release(&ids);
    PyBuffer_Release(&gradients);
    if (!valid) return NULL;
    Py_RETURN_NONE;
}

/* A map of ids to slots: open addressing, where who is further from home stays (Robin Hood, Celis 1986), so that entries
 * lie in the order of their homes, and none is far behind the others. Hashes are of simple tabulation, with which linear
 * probing takes expected constant time whatever the ids are (Patrascu and Thorup, 2012); its numbers are the caller's. */

typedef struct {
    int64_t id; /* below 0: nothing */
    uint32_t hash;
    int32_t slot;
} entry;

typedef struct {
    entry *entries;
    size_t size;
    const uint32_t *table; /* 8 times 256 numbers */
} map;

static inline uint32_t hash_of(const map *map, int64_t id) {
    uint64_t spread = (uint64_t)id * 0x9e3779b97f4a7c15u; /* one to one: ids that have most bytes alike no more have */
    spread ^= spread >> 32;
    uint32_t hash = 0;
    for (int byte = 0; byte < 8; byte++) hash ^= map->table[256 * byte + (spread >> 8 * byte & 255)];
    return hash;
}

static inline size_t home_of(const map *map, uint32_t hash) { return (size_t)((uint64_t)hash * map->size >> 32); }

static inline size_t next_to(const map *map, size_t at) { return at + 1 == map->size ? 0 : at + 1; }

static inline size_t distance(const map *map, size_t at) {
    size_t home = home_of(map, map->entries[at].hash);
    return at >= home ? at - home : at + map->size - home;
}

/* Returns where an id is, or the size of the map. */
static size_t found(const map *map, int64_t id, size_t *probes) {
    uint32_t hash = hash_of(map, id);
    size_t at = home_of(map, hash);
    for (size_t far = 0; far < map->size; far++, at = next_to(map, at)) {
        if (probes && far + 1 > *probes) *probes = far + 1;
        if (map->entries[at].id == id) return at;
        if (map->entries[at].id < 0 || distance(map, at) < far) break;
    }
    return map->size;
}

/* Puts an entry that is not there. Returns whether there was room. */
static int put_entry(const map *map, entry one) {
    size_t at = home_of(map, one.hash), far = 0;
    for (size_t step = 0; step < map->size; step++, far++, at = next_to(map, at)) {
        entry *there = &map->entries[at];
        if (there->id < 0) {
            *there = one;
            return 1;
        }
        size_t its = distance(map, at);
        if (its < far) {
            entry moved = *there;
            *there = one;
            one = moved;
            far = its;
        }
    }
    return 0;
}

static void take_out(const map *map, size_t at) {
    for (size_t step = 1; step < map->size; step++) {
        size_t next = next_to(map, at);
        if (map->entries[next].id < 0 || distance(map, next) == 0) break;
        map->entries[at] = map->entries[next];
        at = next;
    }
    map->entries[at].id = -1;
}

typedef enum { FIND, INSERT, REMOVE } deed;

/* Returns how many probes the longest search took, or -1 where a map is full or has an id already. */
static long done(const map *map, const int64_t *ids, size_t count, int32_t *slots, deed deed) {
    size_t probes = 0;
    for (size_t i = 0; i < count; i++) {
        size_t at = found(map, ids[i], &probes);
        if (deed == INSERT) {
            if (at < map->size || !put_entry(map, (entry){ids[i], hash_of(map, ids[i]), slots[i]})) return -1;
            continue;
        }
        slots[i] = at < map->size ? map->entries[at].slot : -1;
        if (deed == REMOVE && at < map->size) take_out(map, at);
    }
    return (long)probes;
}

static PyObject *in_map(PyObject *arguments, const char *format, deed deed) {
    Py_buffer entries, table, ids, slots;
    long probes = -1;
    if (!PyArg_ParseTuple(arguments, format, &entries, &table, &ids, &slots)) return NULL;
    map map = {entries.buf, (size_t)entries.len / sizeof(entry), table.buf};
    size_t count = (size_t)ids.len / 8;
    int valid = map.size > 0 && map.size <= UINT32_MAX && (size_t)entries.len % sizeof(entry) == 0 &&
                table.len == 8 * 256 * 4 && ids.len % 8 == 0 && (size_t)slots.len == count * 4;
    for (size_t i = 0; valid && i < count; i++) valid = ((const int64_t *)ids.buf)[i] >= 0;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        probes = done(&map, ids.buf, count, slots.buf, deed);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&entries);
    PyBuffer_Release(&table);
    PyBuffer_Release(&ids);
    PyBuffer_Release(&slots);
    if (probes < 0) {
        PyErr_SetString(PyExc_ValueError, "expected ids of 0 or more, a slot for each, and room for those that are new");
        return NULL;
    }
    return PyLong_FromLong(probes);
}

static PyObject *find(PyObject *self, PyObject *arguments) {
    (void)self;
    return in_map(arguments, "y*y*y*w*", FIND);
}

static PyObject *insert(PyObject *self, PyObject *arguments) {
    (void)self;
    return in_map(arguments, "w*y*y*y*", INSERT);
}

static PyObject *take_away(PyObject *self, PyObject *arguments) {
    (void)self;
    return in_map(arguments, "w*y*y*w*", REMOVE);
}

static PyMethodDef functions[] = {
    {"find", find, METH_VARARGS, NULL},
    {"insert", insert, METH_VARARGS, NULL},
    {"remove", take_away, METH_VARARGS, NULL},
    {"take", take, METH_VARARGS, NULL},
    {"put", put, METH_VARARGS, NULL},
    {"sum", sum, METH_VARARGS, NULL},
    {"adagrad", adagrad, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "rows_binding", .m_size = 0, .m_methods = functions,
};

PyMODINIT_FUNC PyInit_rows_binding(void) { return PyModule_Create(&module_definition); }
