/* HighwayHash of 64 bits (Alakuijala, Cox and Wassenberg, 2016), by AVX2 where there is; included by record_binding.c. */

typedef struct {
    uint64_t v0[4], v1[4], mul0[4], mul1[4];
} highway;

static inline uint64_t swap_halves(uint64_t value) { return value >> 32 | value << 32; }

/* Mixes the bytes of two lanes into two others. */
static inline void add_zipped(uint64_t low, uint64_t high, uint64_t *to_low, uint64_t *to_high) {
    *to_low += ((low & 0xff000000u) | (high & 0xff00000000u)) >> 24 |
               ((low & 0xff0000000000u) | (high & 0xff000000000000u)) >> 16 | (low & 0xff0000u) | (low & 0xff00u) << 32 |
               (high & 0xff00000000000000u) >> 8 | low << 56;
    *to_high += ((high & 0xff000000u) | (low & 0xff00000000u)) >> 24 | (high & 0xff0000u) | (high & 0xff0000000000u) >> 16 |
                (high & 0xff00u) << 24 | (low & 0xff000000000000u) >> 8 | (high & 0xffu) << 48 | (low & 0xff00000000000000u);
}

static void highway_update(highway *with, const uint64_t packet[4]) {
    for (int i = 0; i < 4; i++) {
        with->v1[i] += with->mul0[i] + packet[i];
        with->mul0[i] ^= (with->v1[i] & 0xffffffffu) * (with->v0[i] >> 32);
        with->v0[i] += with->mul1[i];
        with->mul1[i] ^= (with->v0[i] & 0xffffffffu) * (with->v1[i] >> 32);
    }
    for (int i = 0; i < 4; i += 2) add_zipped(with->v1[i], with->v1[i + 1], &with->v0[i], &with->v0[i + 1]);
    for (int i = 0; i < 4; i += 2) add_zipped(with->v0[i], with->v0[i + 1], &with->v1[i], &with->v1[i + 1]);
}

static void highway_packets(highway *with, const uint8_t *at, size_t count) {
    for (uint64_t packet[4]; count; count--, at += sizeof packet) {
        memcpy(packet, at, sizeof packet);
        highway_update(with, packet);
    }
}

#ifdef HAS_INSTRUCTION
__attribute__((target("avx2"))) static inline __m256i zipped(__m256i lanes) {
    const __m256i order = _mm256_set_epi64x(0x070806090d0a040b, 0x000f010e05020c03, 0x070806090d0a040b, 0x000f010e05020c03);
    return _mm256_shuffle_epi8(lanes, order);
}

__attribute__((target("avx2"))) static void highway_packets_avx2(highway *with, const uint8_t *at, size_t count) {
    __m256i v0 = _mm256_loadu_si256((const __m256i *)with->v0), v1 = _mm256_loadu_si256((const __m256i *)with->v1);
    __m256i mul0 = _mm256_loadu_si256((const __m256i *)with->mul0), mul1 = _mm256_loadu_si256((const __m256i *)with->mul1);
    for (; count; count--, at += 32) {
        v1 = _mm256_add_epi64(v1, _mm256_add_epi64(mul0, _mm256_loadu_si256((const __m256i *)at)));
        mul0 = _mm256_xor_si256(mul0, _mm256_mul_epu32(v1, _mm256_srli_epi64(v0, 32)));
        v0 = _mm256_add_epi64(v0, mul1);
        mul1 = _mm256_xor_si256(mul1, _mm256_mul_epu32(v0, _mm256_srli_epi64(v1, 32)));
        v0 = _mm256_add_epi64(v0, zipped(v1));
        v1 = _mm256_add_epi64(v1, zipped(v0));
    }
    _mm256_storeu_si256((__m256i *)with->v0, v0);
    _mm256_storeu_si256((__m256i *)with->v1, v1);
    _mm256_storeu_si256((__m256i *)with->mul0, mul0);
    _mm256_storeu_si256((__m256i *)with->mul1, mul1);
}
#endif

/* Takes the last bytes, fewer than a packet. */
static void highway_rest(highway *with, const uint8_t *at, size_t size) {
    uint8_t bytes[32] = {0};
    uint64_t packet[4];
    size_t odd = size & 3, even = size - odd;
    for (int i = 0; i < 4; i++) {
        uint32_t low = (uint32_t)with->v1[i], high = (uint32_t)(with->v1[i] >> 32);
        with->v0[i] += ((uint64_t)size << 32) + size;
        low = low << size | low >> (32 - size);
        high = high << size | high >> (32 - size);
        with->v1[i] = (uint64_t)high << 32 | low;
    }
    memcpy(bytes, at, even);
    if (size & 16)
        memcpy(bytes + 28, at + size - 4, 4);
    else if (odd) {
        bytes[16] = at[even];
        bytes[17] = at[even + (odd >> 1)];
        bytes[18] = at[size - 1];
    }
    memcpy(packet, bytes, sizeof packet);
    highway_update(with, packet);
}

static uint64_t highway64(const uint64_t key[4], const uint8_t *at, size_t size, int by_lanes) {
    highway with = {.mul0 = {0xdbe6d5d5fe4cce2fu, 0xa4093822299f31d0u, 0x13198a2e03707344u, 0x243f6a8885a308d3u},
                    .mul1 = {0x3bd39e10cb0ef593u, 0xc0acf169b5f18a8cu, 0xbe5466cf34e90c6cu, 0x452821e638d01377u}};
    for (int i = 0; i < 4; i++) {
        with.v0[i] = with.mul0[i] ^ key[i];
        with.v1[i] = with.mul1[i] ^ swap_halves(key[i]);
    }
#ifdef HAS_INSTRUCTION
    if (!by_lanes && __builtin_cpu_supports("avx2"))
        highway_packets_avx2(&with, at, size / 32);
    else
#endif
        highway_packets(&with, at, size / 32);
    (void)by_lanes;
    if (size % 32) highway_rest(&with, at + size / 32 * 32, size % 32);
    for (int turn = 0; turn < 4; turn++) {
        uint64_t turned[4];
        for (int i = 0; i < 4; i++) turned[i] = swap_halves(with.v0[i ^ 2]);
        highway_update(&with, turned);
    }
    return with.v0[0] + with.v1[0] + with.mul0[0] + with.mul1[0];
}

static PyObject *highway_hash(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer key, data;
    int by_lanes;
    if (!PyArg_ParseTuple(arguments, "y*y*p", &key, &data, &by_lanes)) return NULL;
    uint64_t lanes[4], found = 0;
    int valid = key.len == sizeof lanes;
    if (valid) {
        memcpy(lanes, key.buf, sizeof lanes);
        found = highway64(lanes, data.buf, (size_t)data.len, by_lanes);
    } else
        PyErr_SetString(PyExc_ValueError, "expected a key of 32 bytes");
    PyBuffer_Release(&key);
    PyBuffer_Release(&data);
    return valid ? PyLong_FromUnsignedLongLong(found) : NULL;
}
