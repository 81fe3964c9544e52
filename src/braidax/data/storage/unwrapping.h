/* Simple chunks of Riegeli files, taken out of their wrapping in place; included by record_binding.c.
 *
 * Source: riegeli, doc/riegeli_records_file_format.md. What a chunk says of itself counts once its two hashes hold. */

#define BLOCK 65536
#define BLOCK_HEADER 24 /* at each multiple of BLOCK, also within a chunk */
#define CHUNK_HEADER 40

/* Where the parts of a chunk lie, from the beginning of the data on; `compression`: -1 where it cannot be told. Sizes and
 * values are as they are stored, without the numbers in front of compressed ones. */
typedef struct {
    int64_t compression, num_records, num_bytes, sizes, sizes_length, values, values_length, sizes_bytes;
} parts;

static const uint64_t riegeli_key[4] = {0x2f696c6567656952u, 0x0a7364726f636572u, 0x2f696c6567656952u, 0x0a7364726f636572u};

/* Moves what lies between headers of blocks to one piece. Returns its size. */
static size_t without_block_headers(uint8_t *at, size_t size, uint64_t place) {
    size_t kept = 0;
    for (size_t from = 0; from < size;) {
        size_t left = BLOCK - (size_t)((place + from) % BLOCK);
        if (left == BLOCK) {
            from += BLOCK_HEADER;
            left -= BLOCK_HEADER;
        }
        if (from >= size) break;
        if (left > size - from) left = size - from;
        if (kept != from) memmove(at + kept, at + from, left);
        kept += left;
        from += left;
    }
    return kept;
}

/* Takes a chunk of `size` bytes, which begins at `place` in its file, out of its wrapping. */
static void unwrap_chunk(uint8_t *chunk, size_t size, uint64_t place, const uint8_t *data, parts *found) {
    uint64_t header[5], number; /* hash of the others, bytes, their hash, type and records, bytes of records */
    *found = (parts){.compression = -1};
    size = without_block_headers(chunk, size, place);
    if (size < CHUNK_HEADER) return;
    memcpy(header, chunk, sizeof header);
    if (highway64(riegeli_key, chunk + 8, CHUNK_HEADER - 8, 0) != header[0]) return;
    if (header[1] > size - CHUNK_HEADER || (header[3] & 0xff) != 'r' || header[4] > INT64_MAX) return;
    const uint8_t *at = chunk + CHUNK_HEADER, *stop = at + header[1];
    if (highway64(riegeli_key, at, (size_t)header[1], 0) != header[2] || at == stop) return;
    uint8_t compression = *at++;
    if ((compression != 0 && compression != 'z') || !read_varint(&at, stop, 63, &number) || number > (uint64_t)(stop - at)) return;
    const uint8_t *sizes = at, *values = at + number;
    uint64_t sizes_bytes = number, values_bytes = (uint64_t)(stop - values);
    at = values;
    if (compression && (!read_varint(&sizes, at, 63, &sizes_bytes) || !read_varint(&values, stop, 63, &values_bytes))) return;
    if (values_bytes != header[4]) return;
    *found = (parts){compression,    (int64_t)(header[3] >> 8), (int64_t)header[4], sizes - data,
                     at - sizes,     values - data,             stop - values,      (int64_t)sizes_bytes};
}

/* data, starts, lengths, places in the file, and a row of `parts` for each chunk; chunks do not share bytes. */
static PyObject *unwrap(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer data, starts, lengths, places, rows;
    if (!PyArg_ParseTuple(arguments, "w*y*y*y*w*", &data, &starts, &lengths, &places, &rows)) return NULL;
    size_t count = (size_t)starts.len / 8;
    int valid = starts.len % 8 == 0 && lengths.len == starts.len && places.len == starts.len &&
                (size_t)rows.len == count * sizeof(parts) &&
                are_inside(starts.buf, lengths.buf, count, (size_t)data.len);
    if (valid) {
        const int64_t *start = starts.buf, *length = lengths.buf, *place = places.buf;
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < count; i++)
            unwrap_chunk((uint8_t *)data.buf + start[i], (size_t)length[i], (uint64_t)place[i], data.buf,
                         (parts *)rows.buf + i);
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "expected chunks that are in the data, and a row for each");
    PyBuffer_Release(&data);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&places);
    PyBuffer_Release(&rows);
    if (!valid) return NULL;
    Py_RETURN_NONE;
}
