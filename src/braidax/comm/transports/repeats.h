/* Collectives of arrays that come again: what each was run with is found by its name and its arrays. */

#ifndef BRAIDAX_REPEATS_H
#define BRAIDAX_REPEATS_H

#define MAX_REPEATS 256 /* of a group */
#define NUM_REPEAT_LISTS 64
#define MAX_REPEAT_DIMS 8

typedef struct { /* a kind of arrays */
    PyObject *dtype, *shape;
    int num_dims;
    Py_ssize_t dims[MAX_REPEAT_DIMS];
} Form;

typedef struct Repeat {
    struct Repeat *next;
    PyObject *name, *key, *schedule, *head;
    Form own, out;
} Repeat;

typedef struct {
    PyObject_HEAD
    PyObject *empty; /* makes an array of a shape and dtype */
    size_t count;
    Repeat *lists[NUM_REPEAT_LISTS];
} Repeats;

static PyTypeObject *repeats_type;

static int has_form(const Array *array, const Form *form) {
    return array->dtype == form->dtype && array->num_dims == form->num_dims &&
           !memcmp(array->shape, form->dims, (size_t)form->num_dims * sizeof *form->dims);
}

static size_t list_of(const void *name, const void *dtype, int num_dims, const Py_ssize_t *dims) {
    size_t hash = (size_t)(uintptr_t)name / 16 * 31 + (size_t)(uintptr_t)dtype / 16;
    for (int i = 0; i < num_dims; i++) hash = hash * 31 + (size_t)dims[i];
    return (hash ^ hash >> 16) % NUM_REPEAT_LISTS;
}

/* A ufunc is itself; a rank may be another object of the same value. */
static int is_same_key(PyObject *one, PyObject *other) {
    if (one == other) return 1;
    return PyLong_CheckExact(one) && PyLong_CheckExact(other) && PyObject_RichCompareBool(one, other, Py_EQ) == 1;
}

/* **Arguments:** `out`: NULL for one that is to be made. */
static Repeat *found_repeat(const Repeats *self, PyObject *name, PyObject *key, const Array *own, const Array *out) {
    if (own->num_dims > MAX_REPEAT_DIMS) return NULL;
    Repeat *repeat = self->lists[list_of(name, own->dtype, own->num_dims, own->shape)];
    for (; repeat; repeat = repeat->next)
        if (repeat->name == name && has_form(own, &repeat->own) && (!out || has_form(out, &repeat->out)) &&
            is_same_key(repeat->key, key)) return repeat;
    return NULL;
}

static int is_same_form(const Form *one, const Form *other) {
    return one->dtype == other->dtype && one->num_dims == other->num_dims &&
           !memcmp(one->dims, other->dims, (size_t)one->num_dims * sizeof *one->dims);
}

static int take_form(Form *form, PyObject *shape, PyObject *dtype) {
    Py_ssize_t num_dims = PyTuple_Check(shape) ? PyTuple_Size(shape) : -1;
    if (num_dims < 0 || num_dims > MAX_REPEAT_DIMS) return PyErr_SetString(PyExc_ValueError, "no shape that is repeated"), -1;
    form->num_dims = (int)num_dims;
    for (Py_ssize_t i = 0; i < num_dims; i++) form->dims[i] = PyLong_AsSsize_t(PyTuple_GetItem(shape, i));
    if (PyErr_Occurred()) return -1;
    form->shape = shape, form->dtype = dtype;
    return 0;
}

static void count_references(Repeat *repeat, void (*change)(PyObject *)) {
    PyObject *held[] = {repeat->name, repeat->key, repeat->schedule, repeat->head, repeat->own.dtype, repeat->own.shape,
                        repeat->out.dtype, repeat->out.shape};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) change(held[i]);
}

static void forget_repeats(Repeats *self) {
    self->count = 0;
    for (size_t i = 0; i < NUM_REPEAT_LISTS; i++)
        for (Repeat *repeat; (repeat = self->lists[i]);) {
            self->lists[i] = repeat->next;
            count_references(repeat, Py_DecRef);
            free(repeat);
        }
}

/* **Arguments:** name, key, shape and dtype of the operand, shape and dtype of the result, schedule, head. */
static PyObject *repeats_remember(Repeats *self, PyObject *arguments) {
    Repeat found = {.next = NULL};
    PyObject *shape, *dtype, *out_shape, *out_dtype;
    if (!PyArg_ParseTuple(arguments, "OOOOOOO!O!", &found.name, &found.key, &shape, &dtype, &out_shape, &out_dtype,
                          schedule_type, &found.schedule, &PyBytes_Type, &found.head)) return NULL;
    if (take_form(&found.own, shape, dtype) < 0 || take_form(&found.out, out_shape, out_dtype) < 0) return NULL;
    if (self->count >= MAX_REPEATS) forget_repeats(self);
    Repeat *repeat, **list = &self->lists[list_of(found.name, dtype, found.own.num_dims, found.own.dims)];
    for (repeat = *list; repeat; repeat = repeat->next)
        if (repeat->name == found.name && is_same_key(repeat->key, found.key) && is_same_form(&repeat->own, &found.own) &&
            is_same_form(&repeat->out, &found.out)) Py_RETURN_NONE;
    if (!(repeat = malloc(sizeof *repeat))) return PyErr_NoMemory();
    *repeat = found;
    count_references(repeat, Py_IncRef);
    repeat->next = *list;
    *list = repeat;
    self->count++;
    Py_RETURN_NONE;
}

static PyObject *repeats_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *empty;
    if (keywords && PyDict_Size(keywords)) return PyErr_SetString(PyExc_TypeError, "no keywords"), NULL;
    if (!PyArg_ParseTuple(arguments, "O", &empty)) return NULL;
    Repeats *self = (Repeats *)PyType_GenericAlloc(type, 0); /* all zero */
    if (!self) return NULL;
    Py_INCREF(empty);
    self->empty = empty;
    return (PyObject *)self;
}

static void repeats_dealloc(Repeats *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    forget_repeats(self);
    Py_XDECREF(self->empty);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

static Py_ssize_t repeats_length(Repeats *self) { return (Py_ssize_t)self->count; }

static PyMethodDef repeats_methods[] = {
    {"remember", (PyCFunction)repeats_remember, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot repeats_slots[] = {
    {Py_tp_new, repeats_new},
    {Py_tp_dealloc, repeats_dealloc},
    {Py_tp_methods, repeats_methods},
    {Py_sq_length, repeats_length},
    {0, NULL},
};

static PyType_Spec repeats_spec = {
    .name = "braidax.comm.transports." BINDING ".Repeats",
    .basicsize = sizeof(Repeats),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = repeats_slots,
};

static int add_repeats(PyObject *module) {
    repeats_type = (PyTypeObject *)PyType_FromSpec(&repeats_spec); /* stays with the module, which stays */
    return repeats_type ? PyModule_AddObjectRef(module, "Repeats", (PyObject *)repeats_type) : -1;
}

static PyObject *made_empty(const Repeats *self, const Form *form) {
    PyObject *shape = form->shape, *dtype = form->dtype; /* which others may forget meanwhile */
    Py_INCREF(shape);
    Py_INCREF(dtype);
    PyObject *array = PyObject_CallFunctionObjArgs(self->empty, shape, dtype, NULL);
    Py_DECREF(shape);
    Py_DECREF(dtype);
    return array;
}

/* Runs again what has come before with such arrays.
 *
 * **Arguments:** repeats, name, key, operand, result or None, tag, and the seconds to spin. **Returns:** the result; or a
 * tuple of the operation that ends with it and the result; None, nothing having begun, for what has not come before. */
static PyObject *worker_repeat(Worker *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 7 || !PyObject_TypeCheck(arguments[0], repeats_type))
        return PyErr_SetString(PyExc_TypeError, "expected 7 arguments, the first one what is repeated"), NULL;
    Repeats *repeats = (Repeats *)arguments[0];
    PyObject *own = arguments[3], *out = arguments[4];
    const Array *operand = known_array(own), *given = out == Py_None ? NULL : known_array(out);
    if (!operand || (out != Py_None && !given)) Py_RETURN_NONE;
    Repeat *repeat = found_repeat(repeats, arguments[1], arguments[2], operand, given);
    if (!repeat) Py_RETURN_NONE;
    PyObject *run[] = {arguments[5], repeat->schedule, repeat->head, own, out, arguments[6]}, *operation = NULL;
    Py_INCREF(run[1]);
    Py_INCREF(run[2]);
    if (given) Py_INCREF(out);
    else run[4] = out = made_empty(repeats, &repeat->out);
    if (out) operation = worker_run(self, run, sizeof run / sizeof *run);
    Py_DECREF(run[1]);
    Py_DECREF(run[2]);
    PyObject *result = operation == Py_None ? out : operation ? PyTuple_Pack(2, operation, out) : NULL;
    if (result != out) Py_XDECREF(out);
    Py_XDECREF(operation);
    return result;
}

#endif
