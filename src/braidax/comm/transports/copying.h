/* Copies of blocks inside a rank.
 *
 * What is larger than the caches is written past them: a write through them first reads what it replaces. The C library
 * does so, too, but takes the caches of a virtual machine for larger than its share of them. */

#ifndef BRAIDAX_COPYING_H
#define BRAIDAX_COPYING_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define STREAM_BYTES ((size_t)8 << 20) /* from more than this on: below, what was written may be read from the caches */
#define LINE_BYTES 64

/* The blocks may share memory. */
static void copy_block(char *to, const char *from, size_t num_bytes) {
#if defined(__x86_64__)
    int overlaps = to < from + num_bytes && from < to + num_bytes;
    if (num_bytes > STREAM_BYTES && !overlaps) {
        size_t first = -(uintptr_t)to % LINE_BYTES, lines = (num_bytes - first) / LINE_BYTES;
        memcpy(to, from, first);
        to += first, from += first;
        for (size_t i = 0; i < lines; i++, to += LINE_BYTES, from += LINE_BYTES) {
            const __m128i *source = (const __m128i *)from;
            __m128i parts[] = {_mm_loadu_si128(source), _mm_loadu_si128(source + 1), _mm_loadu_si128(source + 2),
                               _mm_loadu_si128(source + 3)};
            for (int part = 0; part < 4; part++) _mm_stream_si128((__m128i *)to + part, parts[part]);
        }
        _mm_sfence();
        memcpy(to, from, (num_bytes - first) % LINE_BYTES);
        return;
    }
#endif
    memmove(to, from, num_bytes);
}

#endif
