/* Moves rows of tables for braidax.parallel.served.row_memory; rows_binding.pyi says what Python sees of it.
 *
 * Rows lie anywhere in a table that no cache holds: while one is copied, the ones that follow are on their way. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#endif

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

/* Copies rows from the table, or to it: row `id` begins `id * unit` bytes behind its first. Returns whether all are in it. */
static int move(char *table, size_t size, size_t unit, const int64_t *ids, size_t count, char *rows, size_t width,
                int to_table) {
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || size < width || (uint64_t)ids[i] > (size - width) / unit) return 0;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) ask_for(table + (size_t)ids[i + AHEAD] * unit, width, to_table);
        char *one = table + (size_t)ids[i] * unit;
        if (to_table) copy(one, rows + i * width, width);
        else copy(rows + i * width, one, width);
    }
    return 1;
}

static PyObject *moved(PyObject *arguments, const char *format, int to_table) {
    Py_buffer table, ids, rows;
    unsigned width, unit; /* bytes of a row, and from a row to the next */
    if (!PyArg_ParseTuple(arguments, format, &table, &ids, &rows, &width, &unit)) return NULL;
    size_t count = (size_t)ids.len / 8;
    int valid = width && unit && ids.len % 8 == 0 && (size_t)rows.len == count * width && (size_t)table.len % unit == 0;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        valid = move(table.buf, (size_t)table.len, unit, ids.buf, count, rows.buf, width, to_table);
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
    return moved(arguments, "y*y*w*II", 0);
}

static PyObject *put(PyObject *self, PyObject *arguments) {
    (void)self;
    return moved(arguments, "w*y*y*II", 1);
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

/* Reads or writes all of a block. Returns 0, or what went wrong. */
static int transfer(int file, char *block, size_t size, int64_t number, int writes) {
    for (size_t done = 0; done < size;) {
        off_t at = (off_t)number * (off_t)size + (off_t)done;
        ssize_t some = writes ? pwrite(file, block + done, size - done, at) : pread(file, block + done, size - done, at);
        if (some < 0 && errno == EINTR) continue;
        if (some < 0) return errno;
        if (some == 0) return ENODATA;
        done += (size_t)some;
    }
    return 0;
}

typedef struct {
    char *memory;
    size_t size; /* of a block */
    const int64_t *frames, *outgoing, *incoming;
} blocks;

static int exchange_each(int file, const blocks *of, size_t first, size_t end) {
    int failed = 0;
    for (size_t i = first; !failed && i < end; i++) {
        char *frame = of->memory + (size_t)of->frames[i] * of->size;
        if (of->outgoing[i] >= 0) failed = transfer(file, frame, of->size, of->outgoing[i], 1);
        if (!failed && of->incoming[i] >= 0) failed = transfer(file, frame, of->size, of->incoming[i], 0);
    }
    return failed;
}

#if defined(__linux__)
#define DEPTH 192 /* transfers that a disk is given at a time */

static void prepare(struct iocb *one, int file, const blocks *of, size_t i, int writes, size_t slot) {
    memset(one, 0, sizeof *one);
    one->aio_data = slot;
    one->aio_lio_opcode = writes ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    one->aio_fildes = (uint32_t)file;
    one->aio_buf = (uint64_t)(uintptr_t)(of->memory + (size_t)of->frames[i] * of->size);
    one->aio_nbytes = of->size;
    one->aio_offset = (writes ? of->outgoing[i] : of->incoming[i]) * (int64_t)of->size;
}

/* As exchange_each, by a queue of the kernel. Whatever fails, nothing is under way any more when it returns. */
static int exchange_queued(aio_context_t queue, int file, const blocks *of, size_t first, size_t end) {
    struct iocb some[DEPTH], *ready[DEPTH];
    struct io_event events[DEPTH];
    size_t which[DEPTH], idle[DEPTH], num_idle = DEPTH, num_ready = 0, under_way = 0, next = first;
    int failed = 0;
    for (size_t slot = 0; slot < DEPTH; slot++) idle[slot] = slot;
    while (under_way || (!failed && (num_ready || next < end))) {
        while (!failed && num_idle && next < end) {
            if (of->outgoing[next] >= 0 || of->incoming[next] >= 0) {
                size_t slot = idle[--num_idle];
                which[slot] = next;
                prepare(&some[slot], file, of, next, of->outgoing[next] >= 0, slot);
                ready[num_ready++] = &some[slot];
            }
            next++;
        }
        if (!failed && num_ready) {
            long sent = syscall(SYS_io_submit, queue, (long)num_ready, ready);
            if (sent < 0 && errno != EINTR && !(errno == EAGAIN && under_way)) failed = errno;
            if (sent > 0) {
                memmove(ready, ready + sent, (num_ready - (size_t)sent) * sizeof *ready);
                num_ready -= (size_t)sent;
                under_way += (size_t)sent;
            }
        }
        if (!under_way) continue;
        long found = syscall(SYS_io_getevents, queue, 1L, (long)DEPTH, events, NULL);
        if (found < 0 && errno != EINTR) return errno; /* no queue of this process */
        for (long at = 0; at < found; at++) {
            size_t slot = (size_t)events[at].data, i = which[slot];
            int writes = some[slot].aio_lio_opcode == IOCB_CMD_PWRITE;
            under_way--;
            idle[num_idle++] = slot;
            if (failed) continue;
            if (events[at].res < 0) failed = (int)-events[at].res;
            else if ((size_t)events[at].res != of->size) /* the rest, or why there is none */
                failed = transfer(file, of->memory + (size_t)of->frames[i] * of->size, of->size,
                                  writes ? of->outgoing[i] : of->incoming[i], writes);
            if (!failed && writes && of->incoming[i] >= 0) {
                num_idle--;
                prepare(&some[slot], file, of, i, 0, slot);
                ready[num_ready++] = &some[slot];
            }
        }
    }
    return failed;
}
#endif

/* Opens a queue of the kernel, and returns it; 0 where there is none. */
static PyObject *open_queue(PyObject *self, PyObject *arguments) {
    (void)self;
    (void)arguments;
    unsigned long long found = 0;
#if defined(__linux__)
    aio_context_t queue = 0;
    if (syscall(SYS_io_setup, (long)DEPTH, &queue) == 0) found = queue;
#endif
    return PyLong_FromUnsignedLongLong(found);
}

static PyObject *close_queue(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long queue;
    if (!PyArg_ParseTuple(arguments, "K", &queue)) return NULL;
#if defined(__linux__)
    Py_BEGIN_ALLOW_THREADS
    syscall(SYS_io_destroy, (aio_context_t)queue);
    Py_END_ALLOW_THREADS
#endif
    Py_RETURN_NONE;
}

/* Frames of memory get other blocks of a file: what is outgoing is written, then what is incoming is read; -1 is none.
 * By a queue many are under way at a time; 0 is none, and each waits for the one before it. */
static PyObject *exchange(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer memory, frames, outgoing, incoming;
    int file, failed = 0;
    unsigned long long queue;
    Py_ssize_t size, first, end;
    if (!PyArg_ParseTuple(arguments, "Kiw*ny*y*y*nn", &queue, &file, &memory, &size, &frames, &outgoing, &incoming,
                          &first, &end))
        return NULL;
    Py_ssize_t count = frames.len / 8, num_frames = size > 0 ? memory.len / size : 0;
    int valid = size > 0 && frames.len % 8 == 0 && outgoing.len == frames.len && incoming.len == frames.len &&
                0 <= first && first <= end && end <= count;
    const int64_t *to = frames.buf, *out = outgoing.buf, *in = incoming.buf;
    for (Py_ssize_t i = first; valid && i < end; i++)
        valid = to[i] >= 0 && to[i] < num_frames && out[i] < INT64_MAX / size && in[i] < INT64_MAX / size;
    if (valid) {
        blocks of = {memory.buf, (size_t)size, to, out, in};
        Py_BEGIN_ALLOW_THREADS
#if defined(__linux__)
        if (queue) failed = exchange_queued((aio_context_t)queue, file, &of, (size_t)first, (size_t)end);
        else
#endif
            failed = exchange_each(file, &of, (size_t)first, (size_t)end);
        Py_END_ALLOW_THREADS
    }
    if (!valid) PyErr_SetString(PyExc_ValueError, "expected frames of the memory, and blocks of the file for each");
    if (failed) {
        errno = failed;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&frames);
    PyBuffer_Release(&outgoing);
    PyBuffer_Release(&incoming);
    if (!valid || failed) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"exchange", exchange, METH_VARARGS, NULL},
    {"open_queue", open_queue, METH_NOARGS, NULL},
    {"close_queue", close_queue, METH_VARARGS, NULL},
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
