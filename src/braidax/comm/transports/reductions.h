/* Sums, products, largest and smallest elements of arrays, as NumPy's ufuncs make them; no two loops wait for each other. */

#ifndef BRAIDAX_REDUCTIONS_H
#define BRAIDAX_REDUCTIONS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef void (*Reduction)(void *to, const void *first, const void *second, size_t num_bytes);

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* `to` may be `first` or `second`. */
#define ELEMENTWISE(name, type, result)                                                                     \
    FOR_EACH_CPU static void name(void *to, const void *first, const void *second, size_t num_bytes) {      \
        type *sum = to;                                                                                     \
        const type *left = first, *right = second;                                                          \
        size_t count = num_bytes / sizeof(type);                                                            \
        INDEPENDENT for (size_t i = 0; i < count; i++) {                                                    \
            type a = left[i], b = right[i];                                                                 \
            sum[i] = (type)(result);                                                                        \
        }                                                                                                   \
    }

/* Sums and products of signed numbers are those of unsigned ones, which may overflow. */
#define OF_INTEGERS(bits)                                               \
    ELEMENTWISE(add_##bits, uint##bits##_t, a + b)                      \
    ELEMENTWISE(multiply_##bits, uint##bits##_t, (uint64_t)a * b)       \
    ELEMENTWISE(maximum_i##bits, int##bits##_t, a > b ? a : b)          \
    ELEMENTWISE(minimum_i##bits, int##bits##_t, a < b ? a : b)          \
    ELEMENTWISE(maximum_u##bits, uint##bits##_t, a > b ? a : b)         \
    ELEMENTWISE(minimum_u##bits, uint##bits##_t, a < b ? a : b)
OF_INTEGERS(8)
OF_INTEGERS(16)
OF_INTEGERS(32)
OF_INTEGERS(64)

/* What is no number wins. */
#define OF_FLOATS(name, type)                                           \
    ELEMENTWISE(add_##name, type, a + b)                                \
    ELEMENTWISE(multiply_##name, type, a * b)                           \
    ELEMENTWISE(maximum_##name, type, a >= b || a != a ? a : b)         \
    ELEMENTWISE(minimum_##name, type, a <= b || a != a ? a : b)
OF_FLOATS(f32, float)
OF_FLOATS(f64, double)

typedef struct {
    const char *operation, *dtype; /* NumPy's names: of the ufunc, and `dtype.str` without the order of bytes */
    size_t num_bytes;              /* of an element */
    int can_overflow;              /* and what else NumPy tells of sums and products of floating-point numbers */
    Reduction reduce;
} NamedReduction;

#define NAMED_INTEGERS(bits, bytes)                                                                     \
    {"add", "i" #bytes, bytes, 0, add_##bits}, {"add", "u" #bytes, bytes, 0, add_##bits},                     \
    {"multiply", "i" #bytes, bytes, 0, multiply_##bits}, {"multiply", "u" #bytes, bytes, 0, multiply_##bits}, \
    {"maximum", "i" #bytes, bytes, 0, maximum_i##bits}, {"minimum", "i" #bytes, bytes, 0, minimum_i##bits},   \
    {"maximum", "u" #bytes, bytes, 0, maximum_u##bits}, {"minimum", "u" #bytes, bytes, 0, minimum_u##bits}
#define NAMED_FLOATS(name, dtype, bytes)                                                        \
    {"add", dtype, bytes, 1, add_##name}, {"multiply", dtype, bytes, 1, multiply_##name},             \
    {"maximum", dtype, bytes, 0, maximum_##name}, {"minimum", dtype, bytes, 0, minimum_##name}

static const NamedReduction reductions[] = {
    NAMED_INTEGERS(8, 1),  NAMED_INTEGERS(16, 2),          NAMED_INTEGERS(32, 4),
    NAMED_INTEGERS(64, 8), NAMED_FLOATS(f32, "f4", 4), NAMED_FLOATS(f64, "f8", 8),
};

static const NamedReduction *reduction_of(const char *operation, const char *dtype) {
    for (size_t i = 0; i < sizeof reductions / sizeof *reductions; i++)
        if (!strcmp(reductions[i].operation, operation) && !strcmp(reductions[i].dtype, dtype)) return &reductions[i];
    return NULL;
}

#endif
