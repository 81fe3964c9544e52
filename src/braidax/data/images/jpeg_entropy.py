# LEAD: read LEAD_NOTE.md in this folder before going on with this file.
"""Kernels that decode the Huffman codes of baseline JPEG scans.

A table of 1024 entries tells by the next 10 bits up to two coefficients at once: their values, the zeros before them
and their bits together. Where bits come in a chain, each look-up waiting for the one before, that halves the chain.

Source: ITU-T T.81 (1992), annex F.2.
"""

from typing import Any

import numpy as np

from braidax.data.compiled import inlined, kernel
from braidax.data.images.jpeg_header import AC, COMPONENTS, DC, RESTART, H, V

LOOK = 10  # bits that a table looks up at once
BLOCK = 72  # places for a block: 64 coefficients, and behind them what nobody reads
_SHIFT = np.uint64(64 - LOOK)
_ALL = (1 << LOOK) - 1
_END_RUN = 128  # the run of an end-of-block entry: it leads beyond the block, into places that nobody reads

_U0, _U1, _U2, _U5, _U8, _U16, _U24, _U31, _U32 = (np.uint64(n) for n in (0, 1, 2, 5, 8, 16, 24, 31, 32))
_U48, _U63, _U64, _U255, _END = (np.uint64(n) for n in (48, 63, 64, 255, 129))

# The state of a scan: position and end of its segment in bits, the segment, units left until it ends, last DC values.
POSITION, STOP, SEGMENT, LEFT, LAST = range(5)
NUM_STATES = 7


@kernel
def build_tables(codes: Any, looks: Any, limits: Any, offsets: Any) -> None:
    """Makes look-up tables from code lengths and symbols.

    **Arguments:** `codes`: uint8 `[4, 272]` of `read_header`. `looks`: uint64 `[4 * 2**LOOK]`, filled: of DC tables the
    size of the difference and the length of its code, of AC tables one or two coefficients; 0 for what does not fit.
    `limits`: int64 `[4, 18]`, filled: by length, the first 16 bits behind its codes. `offsets`: int64 `[4, 18]`,
    filled: by length, what to add to a code for the number of its symbol.
    """
    single = np.zeros(1 << LOOK, np.int64)
    for table in range(4):
        counts, symbols = codes[table, :16], codes[table, 16:]
        code, number = 0, 0
        single[:] = 0
        for length in range(1, 17):
            offsets[table, length] = number - code
            for _ in range(np.int64(counts[length - 1])):
                if length <= LOOK:
                    width = 1 << (LOOK - length)
                    for low in range(width):
                        single[code * width + low] = _entry(np.int64(symbols[number]), length, low, table >= 2)
                code += 1
                number += 1
            limits[table, length] = code << (16 - length)
            code <<= 1
        limits[table, 17] = 1 << 17
        for bits in range(1 << LOOK):
            looks[(table << LOOK) + bits] = np.uint64(single[bits]) if table < 2 else _pair(single, bits)


@kernel
def _entry(symbol: int, length: int, low: int, is_ac: bool) -> Any:
    """Returns value << 16 | run << 8 | bits, or 0 when the value's own bits lie beyond the look."""
    if not is_ac:
        return (symbol << 8 | length) if symbol <= 11 else 0
    run, size = symbol >> 4, symbol & 15
    if size == 0:
        return (run if run == 15 else _END_RUN) << 8 | length if run == 0 or run == 15 else 0
    if length + size > LOOK:
        return 0
    value = low >> (LOOK - length - size)
    if value < 1 << (size - 1):
        value -= (1 << size) - 1
    return value << 16 | run << 8 | (length + size)


@kernel
def _pair(single: Any, bits: int) -> Any:
    """Joins the coefficient that these bits begin with and, where it is whole, the one behind it.

    Bits from the top: 16 first value, 16 second value, 8 places from first to second, 8 run of the first, 8 bits of the
    first, 8 bits of both. A single one is written twice to the same place.
    """
    first = single[bits]
    if first == 0:
        return np.uint64(0)
    value, run, length = first >> 16, first >> 8 & 255, first & 255
    second_value, step, both = value, np.int64(0), length
    if run != _END_RUN:
        second = single[bits << length & _ALL]
        if second != 0 and length + (second & 255) <= LOOK:
            second_value, step, both = second >> 16, (second >> 8 & 255) + 1, length + (second & 255)
    return np.uint64(value << 48 | (second_value & 0xFFFF) << 32 | step << 24 | run << 16 | length << 8 | both)


@kernel
def unstuff(data: Any, start: int, stop: int, packed: Any, segments: Any) -> Any:
    """Copies the entropy-coded bytes of a scan without stuffing, as words that are read from the top.

    **Arguments:** `data[start:stop]`: uint8, the scan and all behind it. `packed`: uint8, room for all of it and 16
    bytes a segment, filled with 32-bit words in this machine's order. `segments`: int64 `[n + 1, 2]`, filled: first and
    last bit of each segment between restarts.

    **Returns:** how many segments there are, or 0 if the scan does not end with the end of the image.
    """
    i, j, count = start, 0, 0
    segments[0, 0] = 0
    while i + 1 < stop:
        byte = data[i]
        packed[j ^ 3] = byte
        i += 1
        if byte != 0xFF:
            j += 1
            continue
        following = data[i]
        i += 1
        if following == 0:
            j += 1
            continue
        while following == 0xFF and i < stop:
            following = data[i]
            i += 1
        segments[count, 1] = j * 8
        for pad in range(j, (j + 15) // 4 * 4):
            packed[pad ^ 3] = 0
        count += 1
        if following == 0xD9:
            return count
        if following != 0xD0 + (count - 1 & 7) or count + 1 >= len(segments):
            return 0
        j = (j + 15) // 4 * 4
        segments[count, 0] = j * 8
    return 0


@kernel
def decode_row(num_mcus: int, words: Any, segments: Any, state: Any, head: Any, tables: Any, target: Any) -> Any:
    """Decodes one row of units (MCUs), block by block.

    **Arguments:** `words`: uint32, of `unstuff`. `segments`: int64 `[n, 2]`, of `unstuff`. `state`: int64 `[7]`, see
    above. `head`: of `read_header`. `tables`: `(codes, looks, limits, offsets)`. `target`: `(coefficients, places,
    origins)`: int16, `BLOCK` for each block; uint64 `[256]`, where in it a coefficient goes; int64 `[3]`, where a
    component begins.

    **Returns:** whether the codes were right and did not end early.
    """
    codes, looks, limits, offsets = tables
    coefficients, places, origins = target
    for mcu in range(num_mcus):
        if head[RESTART] and state[LEFT] == 0 and not _restart(segments, state, head):
            return False
        state[LEFT] -= 1
        for c in range(head[COMPONENTS]):
            for block in range(head[H + c] * head[V + c]):
                row, column = block // head[H + c], block % head[H + c]
                first = origins[c] + ((row * num_mcus + mcu) * head[H + c] + column) * BLOCK
                position = state[POSITION]
                if position > state[STOP]:
                    return False
                window = _window(words, np.uint64(position))
                found = np.int64(looks[np.uint64(head[DC + c] << LOOK) + (window >> _SHIFT)])
                if found == 0:
                    found = _symbol(window, codes, limits, offsets, head[DC + c])
                size, length = found >> 8, found & 255
                if size > 11:
                    return False
                state[LAST + c] += _signed(window << np.uint64(length), size)
                coefficients[first] = state[LAST + c]
                table = 2 + head[AC + c]
                state[POSITION] = _block(
                    np.uint64(position + length + size),
                    words,
                    codes,
                    looks,
                    limits,
                    offsets,
                    table,
                    coefficients,
                    first,
                    places,
                )
                if state[POSITION] < 0:
                    return False
    return True


@kernel
def ends_well(state: Any) -> Any:
    """Says whether a segment was used up to its last byte, and not beyond."""
    return 0 <= state[STOP] - state[POSITION] < 8


@kernel
def _restart(segments: Any, state: Any, head: Any) -> Any:
    if not ends_well(state) or state[SEGMENT] + 1 >= len(segments):
        return False
    state[SEGMENT] += 1
    state[POSITION], state[STOP] = segments[state[SEGMENT], 0], segments[state[SEGMENT], 1]
    state[LAST : LAST + 3] = 0
    state[LEFT] = head[RESTART]
    return True


@inlined
def _window(words: Any, position: Any) -> Any:
    """Returns the next 64 bits, the first on top."""
    i, beyond = position >> _U5, position & _U31
    window = (np.uint64(words[i]) << _U32 | np.uint64(words[i + _U1])) << beyond
    return window | np.uint64(words[i + _U2]) << beyond >> _U32


@inlined
def _signed(window: Any, size: int) -> Any:
    """Returns the number of `size` bits on top; those that begin with 0 are negative."""
    value = np.int64(window >> _U1 >> np.uint64(63 - size))
    return value if value >= (1 << size) >> 1 else value - (1 << size) + 1


@inlined
def _symbol(window: Any, codes: Any, limits: Any, offsets: Any, table: int) -> Any:
    """Returns symbol << 8 | length of any code, or a symbol beyond all sizes if there is none."""
    top, length = np.int64(window >> _U48), 1
    while top >= limits[table, length]:
        length += 1
    if length > 16:
        return 1 << 20
    return np.int64(codes[table, 16 + offsets[table, length] + (top >> (16 - length))]) << 8 | length


@inlined
def _block(
    position: Any,
    words: Any,
    codes: Any,
    looks: Any,
    limits: Any,
    offsets: Any,
    table: int,
    coefficients: Any,
    first_place: Any,
    places: Any,
) -> Any:
    """Decodes the 63 higher coefficients of a block; returns the position behind them, or -1 for a wrong code."""
    base = np.uint64(first_place)
    look = np.uint64(table << LOOK)
    k = _U1
    while k < _U64:
        window = _window(words, position)
        for _ in range(6):
            entry = looks[look + (window >> _SHIFT)]
            if entry == _U0:
                window = _window(words, position)
                found = _symbol(window, codes, limits, offsets, table)
                size, length = found >> 8 & 15, found & 255
                if found >> 16 or size > 10 or (size == 0 and found >> 12 != 15 and found >> 12 != 0):
                    return -1
                k += np.uint64(found >> 12) if found >> 8 else np.uint64(_END_RUN)
                coefficients[base + places[k]] = _signed(window << np.uint64(length), size)
                position += np.uint64(length + size)
                k += _U1
                break
            first = k + (entry >> _U16 & _U255)
            coefficients[base + places[first]] = np.int64(entry) >> 48
            if first >= _U63:  # the block ends here, so what follows is none of its coefficients
                position += entry >> _U8 & _U255
                k = first + _U1
                break
            second = first + (entry >> _U24 & _U255)
            coefficients[base + places[second]] = np.int64(entry << _U16) >> 48
            window <<= entry & _U255
            position += entry & _U255
            k = second + _U1
            if k >= _U64:
                break
    return np.int64(position) if k == _U64 or k > _END else -1
