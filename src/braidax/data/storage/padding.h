/* Pieces of memory of any length, each copied to the head of a row; included by record_binding.c. */

enum { AHEAD = 2, FETCHED = 1024 }; /* pieces; bytes of one */

/* Returns whether bytes are UTF-8: no character is cut off, longer than it need be, half of a pair, or beyond U+10FFFF. */
static int is_text(const uint8_t *at, const uint8_t *stop) {
    static const uint32_t least[] = {0, 0x80, 0x800, 0x10000}; /* of characters with so many bytes behind their first */
    while (at < stop) {
        uint64_t some[8];
        if (stop - at >= (int64_t)sizeof some) {
            memcpy(some, at, sizeof some);
            if (!((some[0] | some[1] | some[2] | some[3] | some[4] | some[5] | some[6] | some[7]) & 0x8080808080808080u)) {
                at += sizeof some;
                continue;
            }
        }
        if (stop - at >= 8 && (memcpy(some, at, 8), !(*some & 0x8080808080808080u))) {
            at += 8;
            continue;
        }
        uint32_t value = *at++;
        if (value < 0x80) continue;
        int more = value >= 0xf0 ? 3 : value >= 0xe0 ? 2 : 1;
        if (value < 0xc0 || value > 0xf4 || stop - at < more) return 0;
        value &= 0x3fu >> more;
        for (int i = 0; i < more; i++) {
            if ((*at & 0xc0) != 0x80) return 0;
            value = value << 6 | (*at++ & 0x3f);
        }
        if (value < least[more] || value > 0x10ffff || value >> 11 == 0x1b) return 0;
    }
    return 1;
}

/* Fills a row with the head of a piece, of text with whole characters, and behind it with what `blank` has there. Returns how
 * many bytes of the piece there are, or -1 where text is none. */
static int64_t fill_row(const uint8_t *at, size_t size, int checked, uint8_t *row, const uint8_t *blank, size_t width) {
    if (size > width) {
        size = width;
        for (int back = 0; checked && back < 3 && size && (at[size] & 0xc0) == 0x80; back++) size--;
    }
    if (checked && !is_text(at, at + size)) return -1;
    memcpy(row, at, size);
    memcpy(row + size, blank + size, width - size);
    return (int64_t)size;
}

/* Asks for the first lines of a piece that is copied soon: the rest of it the processor foresees by itself. */
static void fetch(const uint8_t *at, int64_t size) {
    for (int64_t line = 0; line < size && line < FETCHED; line += 64) __builtin_prefetch(at + line);
}

static int are_below(const int64_t *places, size_t count, size_t stop) {
    for (size_t i = 0; i < count; i++)
        if (places[i] < 0 || (uint64_t)places[i] >= stop) return 0;
    return 1;
}

static PyObject *pad(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer data, starts, lengths, places, rows, held, blank;
    int checked;
    if (!PyArg_ParseTuple(arguments, "y*y*y*y*w*w*y*p", &data, &starts, &lengths, &places, &rows, &held, &blank, &checked))
        return NULL;
    size_t count = (size_t)starts.len / 8, num_rows = (size_t)held.len / 8, width = (size_t)blank.len, row = 0;
    int valid = starts.len % 8 == 0 && lengths.len == starts.len && places.len == starts.len && held.len % 8 == 0 &&
                (num_rows == 0 || width <= (size_t)rows.len / num_rows) && (size_t)rows.len == num_rows * width &&
                are_below(places.buf, count, num_rows) && are_inside(starts.buf, lengths.buf, count, (size_t)data.len);
    if (valid) {
        const int64_t *begin = starts.buf, *size = lengths.buf, *place = places.buf;
        int64_t *found = held.buf;
        Py_BEGIN_ALLOW_THREADS
        for (; row < count; row++) {
            if (row + AHEAD < count) fetch((uint8_t *)data.buf + begin[row + AHEAD], size[row + AHEAD]);
            uint8_t *target = (uint8_t *)rows.buf + (size_t)place[row] * width;
            int64_t some = fill_row((uint8_t *)data.buf + begin[row], (size_t)size[row], checked, target, blank.buf, width);
            if (some < 0) break;
            found[place[row]] = some;
        }
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "expected pieces that are in the data, and a place among the rows for each");
    Py_buffer *all[] = {&data, &starts, &lengths, &places, &rows, &held, &blank};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) PyBuffer_Release(all[i]);
    return valid ? PyLong_FromSize_t(row) : NULL;
}
