"""The headers of JPEG files, read by a kernel: what the scan needs, or that it is none of ours.

Ours are the files that cameras and data sets are full of: baseline or extended sequential Huffman-coded, 8 bits, gray
or YCbCr, one scan. Whatever else, and whatever looks damaged, is left to the library that decodes all other images.

Source: ITU-T T.81 (1992), annex B; JFIF 1.02; Exif 2.32, section 4.6 (orientation).
"""

from typing import Any

import numpy as np

from braidax.data.compiled import kernel

WIDTH, HEIGHT, COMPONENTS, RESTART, SCAN, ORIENTATION, H_MAX, V_MAX = range(8)
QUANT, DC, AC, H, V = 8, 11, 14, 17, 20  # three places each, one for a component
NUM_FIELDS = 23

_ZIGZAG = np.array(
    [int(p) for d in range(15) for p in np.flatnonzero(np.add.outer(range(8), range(8)) == d)[:: 1 if d % 2 else -1]],
    np.int64,
)
ZIGZAG_U, ZIGZAG_V = _ZIGZAG % 8, _ZIGZAG // 8  # horizontal and vertical frequency of each coefficient in file order


@kernel
def read_header(data: Any, start: int, stop: int, head: Any, quant: Any, codes: Any) -> Any:
    """Reads the header of one file.

    **Arguments:** `data`: uint8, the file is `data[start:stop]`. `head`: int64 `[NUM_FIELDS]`, filled. `quant`: float32
    `[4, 64]`, filled with the steps in file order. `codes`: uint8 `[4, 272]`, filled: DC 0 and 1, AC 0 and 1, each 16
    counts and 256 symbols.

    **Returns:** whether the file is one of ours.
    """
    head[:], quant[:, 0], codes[:] = 0, 0, 0
    head[ORIENTATION] = 1
    if stop - start < 4 or data[start] != 0xFF or data[start + 1] != 0xD8:
        return False
    at, is_jfif, seen = start + 2, False, 0
    while at + 4 <= stop:
        if data[at] != 0xFF:
            return False
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        first, end = at + 4, at + 2 + (np.int64(data[at + 2]) << 8 | np.int64(data[at + 3]))
        if marker < 0xC0 or end > stop or end < first:
            return False
        if marker == 0xDB:
            if not _quant_tables(data, first, end, quant):
                return False
        elif marker == 0xC4:
            if not _huffman_tables(data, first, end, codes):
                return False
        elif marker == 0xC0 or marker == 0xC1:
            if seen or not _frame(data, first, end, head):
                return False
            seen = 1
        elif marker == 0xDD and end - first == 2:
            head[RESTART] = np.int64(data[first]) << 8 | np.int64(data[first + 1])
        elif marker == 0xE0:
            is_jfif = is_jfif or (end - first >= 5 and data[first] == 0x4A and data[first + 1] == 0x46)
        elif marker == 0xE1:
            _exif(data, first, end, head)
        elif marker == 0xEE:
            if end - first >= 12 and data[first] == 0x41 and data[first + 1] == 0x64 and data[first + 11] != 1:
                return False
        elif marker == 0xDA:
            head[SCAN] = end
            return seen == 1 and _scan(data, first, end, head, quant, is_jfif)
        elif not (0xE0 <= marker <= 0xEF or marker == 0xFE):
            return False
        at = end
    return False


@kernel
def _quant_tables(data: Any, first: int, end: int, quant: Any) -> Any:
    while first < end:
        wide, table = data[first] >> 4, data[first] & 15
        length = 128 if wide else 64
        if wide > 1 or table > 3 or first + 1 + length > end:
            return False
        for k in range(64):
            if wide:
                step = np.int64(data[first + 1 + 2 * k]) << 8 | np.int64(data[first + 2 + 2 * k])
            else:
                step = np.int64(data[first + 1 + k])
            quant[table, k] = step
        first += 1 + length
    return True


@kernel
def _huffman_tables(data: Any, first: Any, end: int, codes: Any) -> Any:
    while first < end:
        kind, table = data[first] >> 4, data[first] & 15
        if kind > 1 or table > 1 or first + 17 > end:
            return False
        place = codes[kind * 2 + table]
        place[:] = 0
        total, room = np.int64(0), np.int64(1)
        for i in range(16):
            place[i] = data[first + 1 + i]
            total += np.int64(place[i])
            room = 2 * room - np.int64(place[i])  # how many codes of this length are still free
            if room < 0:
                return False
        if total > 256 or first + 17 + total > end:
            return False
        place[16 : 16 + total] = data[first + 17 : first + 17 + total]
        first = first + 17 + total
    return True


@kernel
def _frame(data: Any, first: int, end: int, head: Any) -> Any:
    if end - first < 9 or data[first] != 8:
        return False
    head[HEIGHT] = np.int64(data[first + 1]) << 8 | np.int64(data[first + 2])
    head[WIDTH] = np.int64(data[first + 3]) << 8 | np.int64(data[first + 4])
    count = np.int64(data[first + 5])
    if head[HEIGHT] == 0 or head[WIDTH] == 0 or (count != 1 and count != 3) or end - first != 6 + 3 * count:
        return False
    head[COMPONENTS] = count
    for c in range(count):
        at = first + 6 + 3 * c
        head[DC + c] = np.int64(data[at])  # its name, until the scan says which tables are its own
        head[H + c], head[V + c] = np.int64(data[at + 1] >> 4), np.int64(data[at + 1] & 15)
        head[QUANT + c] = np.int64(data[at + 2])
        if head[QUANT + c] > 3:
            return False
    if count == 1:
        head[H], head[V] = 1, 1  # the blocks of a single component are not interleaved, whatever its factors
    for c in range(1, count):
        if head[H + c] != 1 or head[V + c] != 1:
            return False
    head[H_MAX], head[V_MAX] = head[H], head[V]
    return 1 <= head[H] <= 2 and 1 <= head[V] <= 2


@kernel
def _scan(data: Any, first: int, end: int, head: Any, quant: Any, is_jfif: bool) -> Any:
    count = head[COMPONENTS]
    if end - first != 4 + 2 * count or np.int64(data[first]) != count:
        return False
    if count == 3 and not is_jfif and head[DC] == 0x52 and head[DC + 1] == 0x47 and head[DC + 2] == 0x42:
        return False  # components named R, G and B
    for c in range(count):
        at = first + 1 + 2 * c
        tables = np.int64(data[at + 1])
        if np.int64(data[at]) != head[DC + c] or tables >> 4 > 1 or tables & 15 > 1 or quant[head[QUANT + c], 0] == 0:
            return False
        head[DC + c], head[AC + c] = tables >> 4, tables & 15
    return data[end - 3] == 0 and data[end - 2] == 63 and data[end - 1] == 0


@kernel
def _exif(data: Any, first: int, end: int, head: Any) -> None:
    """Finds the orientation in the first directory; leaves the upright one where there is none."""
    if end - first < 14 or data[first] != 0x45 or data[first + 1] != 0x78 or data[first + 4] != 0:
        return
    tiff = first + 6
    small = data[tiff] == 0x49
    at = tiff + _number(data, tiff + 4, 4, small)
    if at + 2 > end:
        return
    for _ in range(_number(data, at, 2, small)):
        if at + 14 > end:
            return
        if _number(data, at + 2, 2, small) == 0x0112:
            orientation = _number(data, at + 10, 2, small)
            if 1 <= orientation <= 8:
                head[ORIENTATION] = orientation
            return
        at += 12


@kernel
def _number(data: Any, at: int, length: int, small: bool) -> Any:
    value = np.int64(0)
    for i in range(length):
        value = value << 8 | np.int64(data[at + (length - 1 - i if small else i)])
    return value
