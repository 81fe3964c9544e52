/* Permutes positions of an epoch for braidax.data; permutation_binding.pyi says what Python sees of it.
 *
 * The same numbers as permutation.py computes with NumPy. Positions are enciphered side by side, LANES at a time, so that one
 * does not wait for the products of another; for processors that multiply vectors of 64 bits the same code is compiled again. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define ROUNDS 10
#define LANES 16
#define MOST_FACTOR ((uint64_t)1 << 32) /* so that 32 bits of a hash times it fit into 64 */

/* Left and right of each pair are numbers below a and b; num_samples are the pairs that count. */
typedef struct {
    uint64_t keys[ROUNDS], a, b, num_samples;
} order;

typedef void permuting(uint64_t *positions, size_t count, const order *of);

static inline __attribute__((always_inline)) uint64_t hashed(uint64_t value, uint64_t key, uint64_t modulus) {
    uint64_t bits = (value ^ key) * 0xBF58476D1CE4E5B9u;
    bits ^= bits >> 27;
    bits = (bits * 0x94D049BB133111EBu + key) * 0xD6E8FEB86659FD93u;
    return ((bits >> 32) * modulus) >> 32;
}

static inline __attribute__((always_inline)) void add_hashes(uint64_t *values, const uint64_t *others, uint64_t key,
                                                             uint64_t modulus) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t sum = values[lane] + hashed(others[lane], key, modulus);
        values[lane] = sum < modulus ? sum : sum - modulus;
    }
}

static inline __attribute__((always_inline)) void encipher(uint64_t *values, const order *of) {
    uint64_t left[LANES], right[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        left[lane] = values[lane] / of->b;
        right[lane] = values[lane] % of->b;
    }
    for (int round = 0; round < ROUNDS; round += 2) {
        add_hashes(left, right, of->keys[round], of->a);
        add_hashes(right, left, of->keys[round + 1], of->b);
    }
    for (int lane = 0; lane < LANES; lane++) values[lane] = left[lane] * of->b + right[lane];
}

/* Those that come out behind the end are permuted again, until they do not: each is below the end when it begins. */
static inline __attribute__((always_inline)) void permute_each(uint64_t *positions, size_t count, const order *of) {
    uint64_t values[LANES];
    for (size_t start = 0; start < count; start += LANES) {
        size_t num = count - start < LANES ? count - start : LANES;
        for (size_t lane = 0; lane < LANES; lane++) values[lane] = lane < num ? positions[start + lane] : 0;
        encipher(values, of);
        for (size_t lane = 0; lane < num; lane++) {
            while (values[lane] >= of->num_samples) {
                uint64_t again[LANES] = {values[lane]};
                encipher(again, of);
                values[lane] = again[0];
            }
            positions[start + lane] = values[lane];
        }
    }
}

static void permute_anywhere(uint64_t *positions, size_t count, const order *of) { permute_each(positions, count, of); }

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2"))) static void permute_avx2(uint64_t *positions, size_t count, const order *of) {
    permute_each(positions, count, of);
}
__attribute__((target("avx512f,avx512dq,avx512vl"))) static void permute_avx512(uint64_t *positions, size_t count,
                                                                               const order *of) {
    permute_each(positions, count, of);
}
#endif

/* Returns the quickest way of this processor. */
static permuting *quickest(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return permute_avx512;
    if (__builtin_cpu_supports("avx2")) return permute_avx2;
#endif
    return permute_anywhere;
}

static int are_below(const uint64_t *positions, size_t count, uint64_t num_samples) {
    uint64_t most = 0;
    for (size_t i = 0; i < count; i++) most = positions[i] > most ? positions[i] : most;
    return count == 0 || most < num_samples;
}

static PyObject *permute(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer positions, keys;
    unsigned long long a, b, num_samples;
    int plainly;
    if (!PyArg_ParseTuple(arguments, "w*y*KKKp", &positions, &keys, &a, &b, &num_samples, &plainly)) return NULL;
    order of = {.a = a, .b = b, .num_samples = num_samples};
    size_t count = (size_t)positions.len / 8;
    int valid = positions.len % 8 == 0 && keys.len == 8 * ROUNDS && a > 0 && b > 0 && a < MOST_FACTOR && b < MOST_FACTOR &&
                num_samples <= a * b && (uintptr_t)positions.buf % 8 == 0 && are_below(positions.buf, count, num_samples);
    if (valid) {
        memcpy(of.keys, keys.buf, sizeof of.keys);
        permuting *permute_all = plainly ? permute_anywhere : quickest();
        Py_BEGIN_ALLOW_THREADS
        permute_all(positions.buf, count, &of);
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "expected positions below num_samples, ten keys, and num_samples <= a * b");
    PyBuffer_Release(&positions);
    PyBuffer_Release(&keys);
    if (!valid) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"permute", permute, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "permutation_binding", .m_size = 0, .m_methods = functions,
};

PyMODINIT_FUNC PyInit_permutation_binding(void) { return PyModule_Create(&module_definition); }
