/* Brings, reads, takes, stacks, unwraps, decodes and pads windows of records for braidax.data; record_binding.pyi says what
 * Python sees of it.
 *
 * What comes from files is not trusted: each length is compared with the bytes that are there. A record that is written in
 * any other way than nearly all writers do is left to Python, which reads all of them and says what is wrong. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_INSTRUCTION
#endif

#define CHECK 4 /* bytes of the checksum behind the data */

/* Returns whether all pieces, from so many bytes on, lie in memory of a size. */
static int are_inside(const int64_t *starts, const int64_t *lengths, size_t count, size_t size) {
    for (size_t i = 0; i < count; i++)
        if (starts[i] < 0 || lengths[i] < 0 || (uint64_t)lengths[i] > size || (uint64_t)starts[i] > size - (uint64_t)lengths[i])
            return 0;
    return 1;
}

/* Reads a number of 7 bits a byte, of so many bits at most, in whole bytes. */
static inline int read_varint(const uint8_t **at, const uint8_t *stop, int bits, uint64_t *number) {
    *number = 0;
    for (int shift = 0; shift < bits; shift += 7) {
        if (*at == stop) return 0;
        uint8_t byte = *(*at)++;
        *number |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) return 1;
    }
    return 0;
}

#include "padding.h"

#include "taking.h"

#include "bringing.h"

#include "stacking.h"

#include "highway.h"

#include "unwrapping.h"

/* Returns how many ranges were read, one after the other, until one could not be. */
static size_t read_each(int file, const int64_t *offsets, const int64_t *lengths, const int64_t *starts, size_t count,
                        char *data) {
    for (size_t i = 0; i < count; i++) {
        int64_t done = 0;
        while (done < lengths[i]) {
            ssize_t got = pread(file, data + starts[i] + done, (size_t)(lengths[i] - done), (off_t)(offsets[i] + done));
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) return i;
            done += got;
        }
    }
    return count;
}

static PyObject *read_ranges(PyObject *self, PyObject *arguments) {
    (void)self;
    int file;
    Py_buffer offsets, lengths, starts, data;
    if (!PyArg_ParseTuple(arguments, "iy*y*y*w*", &file, &offsets, &lengths, &starts, &data)) return NULL;
    size_t count = (size_t)offsets.len / 8, done = 0;
    int valid = offsets.len % 8 == 0 && lengths.len == offsets.len && starts.len == offsets.len &&
                are_inside(starts.buf, lengths.buf, count, (size_t)data.len) &&
                are_inside(offsets.buf, lengths.buf, count, INT64_MAX);
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        done = read_each(file, offsets.buf, lengths.buf, starts.buf, count, data.buf);
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "expected an offset, a length and a place in the data for each range");
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&data);
    return valid ? PyLong_FromSize_t(done) : NULL;
}

static uint32_t table[8][256]; /* of CRC-32C, reflected, for eight bytes at a time; filled alike whenever it is loaded */

static void fill_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0x82f63b78u & -(crc & 1));
        table[0][byte] = crc;
    }
    for (int more = 1; more < 8; more++)
        for (int byte = 0; byte < 256; byte++)
            table[more][byte] = table[more - 1][byte] >> 8 ^ table[0][table[more - 1][byte] & 0xff];
}

static uint32_t crc_by_table(const uint8_t *at, size_t size) {
    uint32_t crc = 0xffffffffu;
    for (; size >= 8; at += 8, size -= 8) {
        crc ^= (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
        crc = table[7][crc & 0xff] ^ table[6][crc >> 8 & 0xff] ^ table[5][crc >> 16 & 0xff] ^ table[4][crc >> 24] ^
              table[3][at[4]] ^ table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
    }
    for (; size; at++, size--) crc = table[0][(crc ^ *at) & 0xff] ^ crc >> 8;
    return ~crc;
}

#ifdef HAS_INSTRUCTION
__attribute__((target("sse4.2"))) static uint32_t crc_by_instruction(const uint8_t *at, size_t size) {
    uint64_t crc = 0xffffffffu, eight;
    for (; size >= 8; at += 8, size -= 8) {
        memcpy(&eight, at, 8);
        crc = _mm_crc32_u64(crc, eight);
    }
    for (; size; at++, size--) crc = _mm_crc32_u8((uint32_t)crc, *at);
    return ~(uint32_t)crc;
}
#endif

typedef uint32_t (*checksum)(const uint8_t *, size_t);

static checksum quickest_checksum(int by_table) {
#ifdef HAS_INSTRUCTION
    if (!by_table && __builtin_cpu_supports("sse4.2")) return crc_by_instruction;
#endif
    (void)by_table;
    return crc_by_table;
}

static PyObject *crc32c(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer data;
    int by_table;
    if (!PyArg_ParseTuple(arguments, "y*p", &data, &by_table)) return NULL;
    uint32_t found = quickest_checksum(by_table)(data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(found);
}

/* Returns whether the checksum behind the data is theirs, as TFRecord masks it. */
static int is_sound(const uint8_t *data, size_t size, checksum crc_of) {
    uint32_t crc = crc_of(data, size), stored;
    memcpy(&stored, data + size, CHECK);
    return stored == (uint32_t)((crc >> 15 | crc << 17) + 0xa282ead8u);
}

enum { BYTES = 0x0a, FLOATS = 0x12, INTEGERS = 0x1a }; /* the kinds of a Feature: tags of its fields 1 to 3 */
enum { FIRST = 0x0a, SECOND = 0x12 };                  /* tags of the fields 1 and 2, of bytes */

/* What is read of each record: the feature of a name. `form`: float32 'f', int32 'i' or int64 'q', `count` of them, or
 * 'p', the place of its values: where they begin and how many bytes they have. */
typedef struct {
    const char *name, *kinds;
    size_t name_length, count;
    int kind, form;
    char *out;
    int64_t seen; /* the last record that has it */
} column;

typedef struct {
    column *columns;
    size_t num_columns;
    int32_t *order; /* which column came at each place of the last record: mostly it does so again */
    const uint8_t *data;
} reader;

/* Reads a length, of bytes that are there. */
static inline int read_length(const uint8_t **at, const uint8_t *stop, size_t *length) {
    uint64_t value;
    if (!read_varint(at, stop, 35, &value)) return 0;
    *length = (size_t)value;
    return value <= (uint64_t)(stop - *at);
}

/* Moves `at` to the bytes of a field that has this tag and reaches to `stop`. */
static inline int enter(const uint8_t **at, const uint8_t *stop, int tag) {
    size_t length;
    if (*at == stop || *(*at)++ != tag || !read_length(at, stop, &length)) return 0;
    return length == (size_t)(stop - *at);
}

static inline int has_name(const column *one, const uint8_t *name, size_t length) {
    return one->name_length == length && memcmp(one->name, name, length) == 0;
}

static column *find(reader *with, size_t place, const uint8_t *name, size_t length) {
    int32_t *before = place < with->num_columns ? &with->order[place] : NULL;
    if (before && *before >= 0 && has_name(&with->columns[*before], name, length)) return &with->columns[*before];
    for (size_t i = 0; i < with->num_columns; i++)
        if (has_name(&with->columns[i], name, length)) {
            if (before) *before = (int32_t)i;
            return &with->columns[i];
        }
    return NULL;
}

/* Returns whether varints fill the bytes, as many as there should be, and each fits. */
static int read_integers(const uint8_t *at, const uint8_t *stop, const column *one, char *out) {
    size_t width = one->form == 'i' ? 4 : 8;
    for (size_t i = 0; i < one->count; i++, out += width) {
        uint64_t value;
        if (!read_varint(&at, stop, 70, &value)) return 0;
        int64_t whole = (int64_t)value;
        int32_t half = (int32_t)whole;
        if (width == 4 && half != whole) return 0;
        memcpy(out, width == 4 ? (void *)&half : (void *)&whole, width);
    }
    return at == stop;
}

/* Reads the values of a feature that is asked for; of bytes there is one, of numbers one packed stretch, or nothing. */
static int read_values(reader *with, column *one, const uint8_t *at, const uint8_t *stop, size_t row) {
    if ((at != stop || one->kind == BYTES) && !enter(&at, stop, FIRST)) return 0;
    size_t size = (size_t)(stop - at);
    if (one->form == 'p') {
        int64_t place[2] = {at - with->data, (int64_t)size};
        memcpy(one->out + row * sizeof place, place, sizeof place);
        return 1;
    }
    if (one->form == 'f') {
        if (size != one->count * 4) return 0;
        memcpy(one->out + row * size, at, size);
        return 1;
    }
    return read_integers(at, stop, one, one->out + row * one->count * (one->form == 'i' ? 4 : 8));
}

/* Returns whether a feature that nobody asked for is one: its name is text, its values have lengths that fit. */
static int is_feature(const uint8_t *name, size_t length, int kind, const uint8_t *at, const uint8_t *stop) {
    for (size_t i = 0; i < length; i++)
        if (name[i] >= 0x80) return 0; /* Python knows whether that is text */
    if (kind != BYTES) return at == stop || enter(&at, stop, FIRST);
    while (at < stop) {
        size_t size;
        if (*at++ != FIRST || !read_length(&at, stop, &size)) return 0;
        at += size;
    }
    return 1;
}

/* Returns whether a record is an example as nearly all writers write it, and has what is asked for. */
static int read_example(reader *with, const uint8_t *at, const uint8_t *stop, size_t row) {
    if (!enter(&at, stop, FIRST)) return 0;
    for (size_t place = 0; at < stop; place++) {
        size_t length;
        if (*at++ != FIRST || !read_length(&at, stop, &length)) return 0;
        const uint8_t *end = at + length;
        if (at == end || *at++ != FIRST || !read_length(&at, end, &length)) return 0;
        const uint8_t *name = at;
        at += length;
        if (!enter(&at, end, SECOND) || at == end) return 0;
        int kind = *at;
        if ((kind != BYTES && kind != FLOATS && kind != INTEGERS) || !enter(&at, end, kind)) return 0;
        column *one = find(with, place, name, length);
        if (!one) {
            if (!is_feature(name, length, kind, at, end)) return 0;
        } else {
            if (one->kind != kind || one->seen == (int64_t)row || !read_values(with, one, at, end, row)) return 0;
            one->seen = (int64_t)row;
        }
        at = end;
    }
    for (size_t i = 0; i < with->num_columns; i++) {
        column *one = &with->columns[i];
        if (one->seen == (int64_t)row) continue;
        if (one->form != 'p' || one->kind == BYTES) return 0;
        memset(one->out + row * 16, 0, 16); /* numbers that are missing are none */
    }
    return 1;
}

/* Finds out what is read of each record. Returns whether it can be, of so many records. */
static int fill_columns(reader *with, PyObject *names, const Py_buffer *kinds, const Py_buffer *forms,
                        const Py_buffer *counts, Py_buffer *outs, size_t num_records) {
    for (size_t i = 0; i < with->num_columns; i++) {
        column *one = &with->columns[i];
        Py_ssize_t length;
        char *name;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(names, (Py_ssize_t)i), &name, &length) < 0) return 0;
        one->name = name;
        one->name_length = (size_t)length;
        one->kind = ((const uint8_t *)kinds->buf)[i];
        one->form = ((const uint8_t *)forms->buf)[i];
        int64_t count = ((const int64_t *)counts->buf)[i];
        size_t width = one->form == 'f' || one->form == 'i' ? 4 : one->form == 'q' ? 8 : one->form == 'p' ? 16 : 0;
        int fits = one->form == 'p' || (one->form == 'f' ? one->kind == FLOATS : one->kind == INTEGERS);
        if (!width || !fits || count < 0 || (one->form == 'p' && count != 1)) return 0;
        one->count = (size_t)count;
        one->out = outs[i].buf;
        one->seen = -1;
        with->order[i] = -1;
        size_t row = (size_t)count <= SIZE_MAX / 16 ? (size_t)count * width : SIZE_MAX;
        if (num_records && row > (size_t)outs[i].len / num_records) return 0;
        if ((size_t)outs[i].len != row * num_records) return 0;
    }
    return 1;
}

static PyObject *decode(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer data, starts, lengths, kinds, forms, counts, plain;
    PyObject *names, *targets;
    int checked;
    if (!PyArg_ParseTuple(arguments, "y*y*y*pO!y*y*y*O!w*", &data, &starts, &lengths, &checked, &PyTuple_Type, &names, &kinds,
                          &forms, &counts, &PyTuple_Type, &targets, &plain))
        return NULL;
    size_t num = (size_t)PyTuple_Size(names), num_records = (size_t)starts.len / 8, held = 0;
    int valid = (size_t)PyTuple_Size(targets) == num && (size_t)kinds.len == num && (size_t)forms.len == num &&
                (size_t)counts.len == num * 8 && starts.len % 8 == 0 && lengths.len == starts.len &&
                (size_t)plain.len == num_records && are_inside(starts.buf, lengths.buf, num_records, (size_t)data.len);
    Py_buffer *outs = calloc(num + 1, sizeof *outs);
    reader with = {calloc(num + 1, sizeof(column)), num, calloc(num + 1, sizeof(int32_t)), data.buf};
    int enough = outs && with.columns && with.order;
    while (valid && enough && held < num) {
        if (PyObject_GetBuffer(PyTuple_GetItem(targets, (Py_ssize_t)held), &outs[held], PyBUF_WRITABLE) < 0) break;
        held++;
    }
    valid = valid && enough && held == num && fill_columns(&with, names, &kinds, &forms, &counts, outs, num_records);
    if (valid) {
        const int64_t *begin = starts.buf, *size = lengths.buf;
        uint8_t *is_plain = plain.buf;
        checksum crc_of = quickest_checksum(0);
        Py_BEGIN_ALLOW_THREADS
        for (size_t row = 0; row < num_records; row++) {
            const uint8_t *at = with.data + begin[row];
            size_t length = (size_t)size[row];
            is_plain[row] = 0;
            if (checked) {
                if (length < CHECK || !is_sound(at, length - CHECK, crc_of)) continue;
                length -= CHECK;
            }
            is_plain[row] = (uint8_t)read_example(&with, at, at + length, row);
        }
        Py_END_ALLOW_THREADS
    } else if (!enough)
        PyErr_NoMemory();
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "expected records that are in the data, and a place for what is read of them");
    while (held) PyBuffer_Release(&outs[--held]);
    free(outs);
    free(with.columns);
    free(with.order);
    Py_buffer *all[] = {&data, &starts, &lengths, &kinds, &forms, &counts, &plain};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) PyBuffer_Release(all[i]);
    if (!valid) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"read", read_ranges, METH_VARARGS, NULL},
    {"crc32c", crc32c, METH_VARARGS, NULL},
    {"decode", decode, METH_VARARGS, NULL},
    {"pad", pad, METH_VARARGS, NULL},
    {"take", take, METH_VARARGS, NULL},
    {"bring", bring, METH_VARARGS, NULL},
    {"stack", stack, METH_VARARGS, NULL},
    {"highway", highway_hash, METH_VARARGS, NULL},
    {"unwrap", unwrap, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "record_binding", .m_size = 0, .m_methods = functions,
};

PyMODINIT_FUNC PyInit_record_binding(void) {
    fill_table();
    return PyModule_Create(&module_definition);
}
