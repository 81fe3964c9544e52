# LEAD: read LEAD_NOTE.md in this folder before going on with this file.
"""Kernels that decode the Huffman codes of baseline JPEG scans.

A table of 1024 entries tells by the next 10 bits up to two coefficients at once: their values, the zeros before them
and their bits together. Where bits come in a chain, each look-up waiting for the one before, that halves the chain.

Source: ITU-T T.81 (1992), annex F.2.
"""

from typing import Any

import numpy as np

from braidax.data.compiled import eight_bytes, kernel, put_bytes
from braidax.data.images.jpeg_header import ZIGZAG_U, ZIGZAG_V

LOOK = 10  # bits that a table looks up at once
BLOCK = 72  # places for a block: 64 coefficients, and behind them what nobody reads
_SHIFT = np.uint64(64 - LOOK)
_ALL = (1 << LOOK) - 1
_END_RUN = 128  # the run of an end-of-block entry: it leads beyond the block, into places that nobody reads

# The state of a scan: position and end of its segment in bits, the segment, units left until it ends, last DC values.
POSITION, STOP, SEGMENT, LEFT, LAST = range(5)
NUM_STATES = 7

# A plan, uint64 `[n, 5]`, has for each block of a unit its component, where its look-ups for DC and for AC begin, where
# the block goes in the first unit, and how much further in the next.

PLACES = np.full(256, 64, np.uint64)  # where in a block a coefficient goes, by its number in the file
PLACES[:64] = ZIGZAG_U * 8 + ZIGZAG_V

_U0, _U1, _U3, _U7, _U8, _U16, _U24, _U48 = (np.uint64(n) for n in (0, 1, 3, 7, 8, 16, 24, 48))
_ONES, _SIGNS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_U63, _U64, _U255, _END, _LOOK = (np.uint64(n) for n in (63, 64, 255, 129, LOOK))


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
    """Returns value << 16 | run << 8 | bits; less than 0, as of `_long_code`, when the value's bits lie beyond."""
    if not is_ac:
        return (symbol << 8 | length) if symbol <= 11 else 0
    run, size = symbol >> 4, symbol & 15
    if size == 0:
        return (run if run == 15 else _END_RUN) << 8 | length if run == 0 or run == 15 else 0
    if length + size > LOOK:
        return -(run << 24 | size << 16 | length << 8)
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
    if first & 255 == 0:
        return np.uint64(-first)
    value, run, length = first >> 16, first >> 8 & 255, first & 255
    second_value, step, both = value, np.int64(0), length
    if run != _END_RUN:
        second = single[bits << length & _ALL]
        if second & 255 != 0 and length + (second & 255) <= LOOK:
            second_value, step, both = second >> 16, (second >> 8 & 255) + 1, length + (second & 255)
    return np.uint64(value << 48 | (second_value & 0xFFFF) << 32 | step << 24 | run << 16 | length << 8 | both)


@kernel
def unstuff(data: Any, start: int, stop: int, packed: Any, segments: Any) -> Any:
    """Copies the entropy-coded bytes of a scan without stuffing, as words that are read from the top.

    **Arguments:** `data[start:stop]`: uint8, the scan and all behind it. `packed`: uint8, room for all of it and 8
    bytes a segment, filled. `segments`: int64 `[n + 1, 2]`, filled: first and
    last bit of each segment between restarts.

    **Returns:** how many segments there are, or 0 if the scan does not end with the end of the image.
    """
    i, j, count = start, 0, 0
    segments[0, 0] = 0
    while i + 1 < stop:
        if i + 8 < stop:
            number = eight_bytes(data, np.uint64(i))
            put_bytes(packed, np.uint64(j), number)
            if not (~number - _ONES) & number & _SIGNS:  # none of them is 255
                i += 8
                j += 8
                continue
        byte = data[i]
        packed[j] = byte
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
        packed[j : j + 8] = 0
        count += 1
        if following == 0xD9:
            return count
        if following != 0xD0 + (count - 1 & 7) or count + 1 >= len(segments):
            return 0
        j += 8
        segments[count, 0] = j * 8
    return 0


@kernel
def decode_row(num_mcus: int, scan: Any, state: Any, plan: Any, tables: Any, coefficients: Any) -> Any:
    """Decodes one row of units (MCUs), block by block.

    **Arguments:** `scan`: `(packed, segments, restart)`, the units in a segment or 0. `state`, `plan`: see above.
    `tables`: `(looks, codes, limits, offsets, places)`; the last are `PLACES`. `coefficients`: int16, flat.

    **Returns:** whether the codes were right and did not end early.
    """
    packed, segments, restart = scan
    looks, codes, limits, offsets, places = tables
    position = np.uint64(state[POSITION])
    for mcu in range(num_mcus):
        if restart and state[LEFT] == 0:
            if not _restart(segments, state, restart, position):
                return False
            position = np.uint64(state[POSITION])
        state[LEFT] -= 1
        for number in range(len(plan)):
            last, ac = LAST + plan[number, 0], plan[number, 2]
            first = plan[number, 3] + np.uint64(mcu) * plan[number, 4]
            window = eight_bytes(packed, position >> _U3) << (position & _U7)
            found = np.int64(looks[plan[number, 1] + (window >> _SHIFT)])
            if found == 0:
                found = _symbol(window, codes, limits, offsets, np.int64(plan[number, 1] >> _LOOK))
            size, length = found >> 8, found & 255
            if size > 11 or position > np.uint64(state[STOP]):
                return False
            state[last] += _signed(window << np.uint64(length), size)
            coefficients[first] = state[last]
            position += np.uint64(length + size)
            k = _U1
            while k < _U64:
                window = eight_bytes(packed, position >> _U3) << (position & _U7)
                for _ in range(5):  # of at most 10 bits each: a window has 57 or more
                    entry = looks[ac + (window >> _SHIFT)]
                    if entry & _U255 == _U0:
                        window = eight_bytes(packed, position >> _U3) << (position & _U7)
                        if entry == _U0:
                            entry = _long_code(window, codes, limits, offsets, np.int64(ac >> _LOOK))
                        k += entry >> _U24
                        size, length = np.int64(entry >> _U16 & _U255), entry >> _U8 & _U255
                        coefficients[first + places[k]] = _signed(window << length, size)
                        position, k = position + length + np.uint64(size), k + _U1
                        break
                    second = k + (entry >> _U16 & _U255)
                    coefficients[first + places[second]] = np.int64(entry) >> 48
                    if second >= _U63:  # the block ends here, so what follows is none of its coefficients
                        position, k = position + (entry >> _U8 & _U255), second + _U1
                        break
                    k = second + (entry >> _U24 & _U255)
                    coefficients[first + places[k]] = np.int64(entry << _U16) >> 48
                    window <<= entry & _U255
                    position += entry & _U255
                    k += _U1
                    if k >= _U64:
                        break
            if k != _U64 and k < _END:
                return False
    state[POSITION] = position
    return True


@kernel
def ends_well(state: Any) -> Any:
    """Says whether a segment was used up to its last byte, and not beyond."""
    return 0 <= state[STOP] - state[POSITION] < 8


@kernel
def _restart(segments: Any, state: Any, restart: int, position: Any) -> Any:
    state[POSITION] = position
    if not ends_well(state) or state[SEGMENT] + 1 >= len(segments):
        return False
    state[SEGMENT] += 1
    state[POSITION], state[STOP] = segments[state[SEGMENT], 0], segments[state[SEGMENT], 1]
    state[LAST : LAST + 3] = 0
    state[LEFT] = restart
    return True


@kernel
def _signed(window: Any, size: int) -> Any:
    """Returns the number of `size` bits on top; those that begin with 0 are negative."""
    value = np.int64(window >> _U1 >> np.uint64(63 - size))
    return value if value >= (1 << size) >> 1 else value - (1 << size) + 1


@kernel
def _symbol(window: Any, codes: Any, limits: Any, offsets: Any, table: int) -> Any:
    """Returns symbol << 8 | length of any code, or a symbol beyond all others if there is none."""
    top, length = np.int64(window >> _U48), 1
    while top >= limits[table, length]:
        length += 1
    if length > 16:
        return 1 << 20
    return np.int64(codes[table, 16 + offsets[table, length] + (top >> (16 - length))]) << 8 | length


@kernel
def _long_code(window: Any, codes: Any, limits: Any, offsets: Any, table: int) -> Any:
    """Returns run << 24 | size << 16 | length << 8 of any code; a wrong one gets a run that ends no block well."""
    found = _symbol(window, codes, limits, offsets, table)
    symbol, length = found >> 8, found & 255
    run, size = symbol >> 4, symbol & 15
    if symbol == 0:
        run = _END_RUN
    elif symbol > 255 or size > 10 or (size == 0 and run != 15):
        run, size = 64, 0
    return np.uint64(run << 24 | size << 16 | length << 8)
