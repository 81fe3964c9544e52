/* Groups rows by an integer for braidax.frame.summing.groups; groups_binding.pyi says what Python sees of it.
 *
 * Each row gets a slot: that of its key in a table of all numbers between the least and the greatest one where these
 * are not many more than the rows, so that groups come in the order of their keys, else that of a hash table. Groups
 * are the slots that both sides have rows of. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ROWS (1u << 28)  /* of a side; slots are numbered by 32 bits */
#define SLOTS_PER_ROW 4      /* up to which a table of all numbers is used */
#define NO_GROUP UINT32_MAX

typedef struct {
    const int64_t *keys;
    uint32_t *groups;
    size_t num_rows;
} side_t;

typedef struct {
    uint64_t least;       /* of a table of all numbers, as the others of such a table */
    uint64_t span;
    int is_hashed;
    size_t num_slots;     /* a power of two if hashed; one more is for rows without a group */
    int64_t *keys;        /* of each slot, if hashed */
    uint32_t *own, *other; /* rows of each slot */
} slots_t;

static uint64_t mixed(uint64_t key) {
    key ^= key >> 32;
    key *= 0xd6e8feb86659fd93u;
    key ^= key >> 32;
    key *= 0xd6e8feb86659fd93u;
    return key ^ key >> 32;
}

/* Returns 0 without memory. */
static int open_slots(slots_t *slots, const side_t *own, size_t num_rows) {
    int64_t least = own->keys[0], most = own->keys[0];
    for (size_t i = 1; i < own->num_rows; i++) {
        least = own->keys[i] < least ? own->keys[i] : least;
        most = own->keys[i] > most ? own->keys[i] : most;
    }
    slots->least = (uint64_t)least;
    slots->span = (uint64_t)most - (uint64_t)least;
    slots->is_hashed = slots->span / SLOTS_PER_ROW >= num_rows;
    slots->num_slots = (size_t)slots->span + 1;
    if (slots->is_hashed)
        for (slots->num_slots = 2; slots->num_slots < 2 * own->num_rows;) slots->num_slots *= 2;
    slots->keys = slots->is_hashed ? malloc(slots->num_slots * sizeof *slots->keys) : NULL;
    slots->own = calloc(slots->num_slots + 1, sizeof *slots->own);
    slots->other = calloc(slots->num_slots + 1, sizeof *slots->other);
    return slots->own && slots->other && (slots->keys || !slots->is_hashed);
}

static void close_slots(slots_t *slots) {
    free(slots->keys);
    free(slots->own);
    free(slots->other);
}

/* Returns the slot of a key, or the empty one where it would be. Half of all slots are empty, so that there is one. */
static size_t slot_of(const slots_t *slots, int64_t key) {
    size_t mask = slots->num_slots - 1, slot = (size_t)mixed((uint64_t)key) & mask;
    while (slots->own[slot] && slots->keys[slot] != key) slot = (slot + 1) & mask;
    return slot;
}

static void put_own(slots_t *slots, side_t *side) {
    for (size_t i = 0; i < side->num_rows; i++) {
        size_t slot;
        if (slots->is_hashed) {
            slot = slot_of(slots, side->keys[i]);
            slots->keys[slot] = side->keys[i];
        } else {
            slot = (size_t)((uint64_t)side->keys[i] - slots->least);
        }
        slots->own[slot]++;
        side->groups[i] = (uint32_t)slot;
    }
}

static void find_other(slots_t *slots, side_t *side) {
    for (size_t i = 0; i < side->num_rows; i++) {
        size_t slot;
        if (slots->is_hashed) {
            slot = slot_of(slots, side->keys[i]);
            slot = slots->own[slot] ? slot : slots->num_slots;
        } else {
            uint64_t offset = (uint64_t)side->keys[i] - slots->least;
            slot = offset <= slots->span ? (size_t)offset : slots->num_slots;
        }
        slots->other[slot]++;
        side->groups[i] = (uint32_t)slot;
    }
}

/* Numbers the slots that are groups, in place of how many rows they have. Returns how many there are. */
static uint32_t number(slots_t *slots, int has_other, int64_t *keys, int64_t *own_counts, int64_t *other_counts) {
    uint32_t num = 0;
    for (size_t slot = 0; slot < slots->num_slots; slot++) {
        if (!slots->own[slot] || (has_other && !slots->other[slot])) {
            slots->own[slot] = NO_GROUP;
            continue;
        }
        keys[num] = slots->is_hashed ? slots->keys[slot] : (int64_t)(slots->least + slot);
        own_counts[num] = slots->own[slot];
        if (has_other) other_counts[num] = slots->other[slot];
        slots->own[slot] = num++;
    }
    slots->own[slots->num_slots] = NO_GROUP;
    return num;
}

static void name_groups(const slots_t *slots, side_t *side, uint32_t num) {
    for (size_t i = 0; i < side->num_rows; i++) {
        uint32_t group = slots->own[side->groups[i]];
        side->groups[i] = group < num ? group : num;
    }
}

/* Returns how many groups there are, or -1 without memory. */
static int64_t group(side_t *own, side_t *other, int64_t *keys, int64_t *own_counts, int64_t *other_counts,
                     int *is_ascending) {
    slots_t slots = {0};
    *is_ascending = 1;
    if (!own->num_rows || (other && !other->num_rows)) {
        memset(own->groups, 0, own->num_rows * sizeof *own->groups);
        if (other) memset(other->groups, 0, other->num_rows * sizeof *other->groups);
        return 0;
    }
    int64_t num = -1;
    if (open_slots(&slots, own, own->num_rows + (other ? other->num_rows : 0))) {
        put_own(&slots, own);
        if (other) find_other(&slots, other);
        num = number(&slots, other != NULL, keys, own_counts, other_counts);
        name_groups(&slots, own, (uint32_t)num);
        if (other) name_groups(&slots, other, (uint32_t)num);
        *is_ascending = !slots.is_hashed;
    }
    close_slots(&slots);
    return num;
}

static int is_side(const Py_buffer *keys, const Py_buffer *groups) {
    return keys->len % 8 == 0 && groups->len % 4 == 0 && keys->len / 8 == groups->len / 4;
}

/* Whether as many groups fit as the smaller side has rows. */
static int fits(const Py_buffer *out, size_t num_rows) {
    return out->len % 8 == 0 && (size_t)out->len / 8 >= num_rows;
}

static PyObject *joined(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer at[7]; /* keys of both sides, their groups, keys and counts of groups */
    if (!PyArg_ParseTuple(arguments, "y*y*w*w*w*w*w*", &at[0], &at[1], &at[2], &at[3], &at[4], &at[5], &at[6]))
        return NULL;
    side_t own = {at[0].buf, at[2].buf, (size_t)at[0].len / 8}, other = {at[1].buf, at[3].buf, (size_t)at[1].len / 8};
    size_t most = own.num_rows < other.num_rows ? own.num_rows : other.num_rows;
    int valid = is_side(&at[0], &at[2]) && is_side(&at[1], &at[3]) && own.num_rows <= MAX_ROWS &&
                other.num_rows <= MAX_ROWS && fits(&at[4], most) && fits(&at[5], most) && fits(&at[6], most);
    int64_t num = -1;
    int is_ascending = 0;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        num = group(&own, &other, at[4].buf, at[5].buf, at[6].buf, &is_ascending);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < 7; i++) PyBuffer_Release(&at[i]);
    if (!valid) return PyErr_Format(PyExc_ValueError, "expected buffers of the lengths of two sides of 2**28 rows each at most");
    return num < 0 ? PyErr_NoMemory() : Py_BuildValue("Li", (long long)num, is_ascending);
}

static PyObject *grouped(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer at[4]; /* keys, groups, keys and counts of groups */
    if (!PyArg_ParseTuple(arguments, "y*w*w*w*", &at[0], &at[1], &at[2], &at[3])) return NULL;
    side_t own = {at[0].buf, at[1].buf, (size_t)at[0].len / 8};
    int valid = is_side(&at[0], &at[1]) && own.num_rows <= MAX_ROWS && fits(&at[2], own.num_rows) &&
                fits(&at[3], own.num_rows);
    int64_t num = -1;
    int is_ascending = 0;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        num = group(&own, NULL, at[2].buf, at[3].buf, NULL, &is_ascending);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < 4; i++) PyBuffer_Release(&at[i]);
    if (!valid) return PyErr_Format(PyExc_ValueError, "expected buffers of the lengths of a side of 2**28 rows at most");
    return num < 0 ? PyErr_NoMemory() : Py_BuildValue("Li", (long long)num, is_ascending);
}

#define EACH(type, change)                                  \
    do {                                                    \
        const type *from = values->buf;                     \
        type *to = out->buf;                                \
        for (size_t i = 0; i < num_rows; i++) {             \
            if (of[i] >= num_out) return 0;                 \
            type value = from[i], *one = to + of[i];        \
            change;                                         \
        }                                                   \
    } while (0)

/* Returns whether all rows have a place in the output. */
static int put(int what, const Py_buffer *values, const uint32_t *of, const Py_buffer *out) {
    size_t num_rows = (size_t)values->len / 8, num_out = (size_t)out->len / 8;
    switch (what) {
        case 'i': EACH(uint64_t, *one += value); break; /* wraps as Polars does */
        case 'f': EACH(double, *one += value); break;
        case '<': EACH(int64_t, *one = value < *one ? value : *one); break;
        case '>': EACH(int64_t, *one = value > *one ? value : *one); break;
        default: return 0;
    }
    return 1;
}

static PyObject *combine(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer values, groups, out;
    int what;
    if (!PyArg_ParseTuple(arguments, "Cy*y*w*", &what, &values, &groups, &out)) return NULL;
    int valid = is_side(&values, &groups) && out.len % 8 == 0;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        valid = put(what, &values, groups.buf, &out);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&groups);
    PyBuffer_Release(&out);
    if (!valid) return PyErr_Format(PyExc_ValueError, "expected i, f, < or >, values of 8 bytes, and a group for each");
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"joined", joined, METH_VARARGS, NULL},
    {"grouped", grouped, METH_VARARGS, NULL},
    {"combine", combine, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "groups_binding", .m_size = 0, .m_methods = functions,
};

PyMODINIT_FUNC PyInit_groups_binding(void) { return PyModule_Create(&module_definition); }
