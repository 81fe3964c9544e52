# LEAD: read LEAD_NOTE.md in this folder before going on with this file.
"""Kernels from the coefficients of JPEG blocks to the pixels of a resized image.

Everything is done eight numbers at a time, side by side, which compilers turn into one instruction.

Source: Arai, Agui, Nakajima, "A fast DCT-SQ scheme for images" (Trans. IEICE E71, 1988); ITU-T T.81 (1992), annex A;
JFIF 1.02 for the colors.
"""

import math
from typing import Any

import numpy as np

from braidax.data.compiled import inlined, kernel
from braidax.data.images.jpeg_entropy import BLOCK
from braidax.data.images.jpeg_header import ZIGZAG_U, ZIGZAG_V

_SCALES = np.array([1 if k == 0 else math.cos(k * math.pi / 16) * math.sqrt(2) for k in range(8)])
_STEPS = _SCALES[ZIGZAG_U] * _SCALES[ZIGZAG_V] / 8
_PLACES = ZIGZAG_U * 8 + ZIGZAG_V
_SQRT2, _C1, _C2, _C3 = (np.float32(x) for x in (1.414213562, 1.847759065, 1.082392200, 2.613125930))
_RED, _GREEN_B, _GREEN_R, _BLUE = (np.float32(x) for x in (1.402, -0.344136, -0.714136, 1.772))
_ZERO, _TOP, _LEVEL = (np.float32(x) for x in (0.5, 255.5, 128.5))  # one half is for rounding
_INTERPOLATED = 1.125  # six times the variance of the weights 3/4 and 1/4; a triangle's is a sixth of its square


@kernel
def fill_taps(start: int, length: int, new_length: int, factor: int) -> Any:
    """Says how the target's values come from the samples of a plane, along one dim.

    **Arguments:** `start`, `length`: of the crop, in pixels. `new_length`: of the target. `factor`: pixels in a sample.

    **Returns:** int64 `[new_length]`, the first sample, and float32 `[new_length, taps]`, the weights.
    """
    step = length / new_length
    support = max(step, 1.0) / factor
    if factor > 1:
        support = math.sqrt(support * support + _INTERPOLATED)
    low, high = start // factor, -(-(start + length) // factor)
    count = min(int(2 * support) + 2, high - low)
    first, weights = np.empty(new_length, np.int64), np.zeros((new_length, count), np.float32)
    for i in range(new_length):
        center = (start + (i + 0.5) * step) / factor
        lowest = min(max(math.floor(center - support + 0.5), low), high - count)
        first[i] = lowest
        total = 0.0
        for t in range(count):
            total += max(0.0, 1.0 - abs(lowest + t + 0.5 - center) / support)
        for t in range(count):
            weights[i, t] = max(0.0, 1.0 - abs(lowest + t + 0.5 - center) / support) / total
    return first, weights


@kernel
def scaled_steps(quant: Any, steps: Any) -> None:
    """Turns quantization steps in file order into factors for the transform, float32 `[4, 64]`."""
    for table in range(4):
        for k in range(64):
            steps[table, _PLACES[k]] = quant[table, k] * np.float32(_STEPS[k])


@kernel
def add_blocks(coefficients: Any, steps: Any, x_taps: Any, y_taps: Any, row: int, work: Any, plane: Any) -> None:
    """Adds what one row of blocks contributes to a plane of the target.

    **Arguments:** `coefficients`: int16, `BLOCK` for each block of the row. `steps`: float32 `[64]`. `x_taps`,
    `y_taps`: of `fill_taps`. `row`: number of the row's first sample. `work`: float32, 64 for each block. `plane`:
    float32, rows as long as the target's, rounded up to eight.
    """
    x_first, x_weights = x_taps
    y_first, y_weights = y_taps
    new_width, y_count = len(x_first), y_weights.shape[1]
    low, high = 0, len(y_first)
    while low < high and y_first[low] + y_count <= row:
        low += 1
    while high > low and y_first[high - 1] >= row + 8:
        high -= 1
    if low == high:
        return
    for block in range(x_first[0] // 8, (x_first[-1] + x_weights.shape[1] + 7) // 8):
        for i in range(64):
            work[block * 64 + i] = np.float32(coefficients[block * BLOCK + i]) * steps[i]
        _transform(work, block * 64)
    tiles = np.empty(128, np.float32)
    for group in range((new_width + 7) // 8):
        for i in range(8):
            x = min(group * 8 + i, new_width - 1)
            _filter(work, x_first[x] * 8, x_weights[x], tiles, 64 + i * 8)
        for i in range(8):
            for j in range(8):
                tiles[j * 8 + i] = tiles[64 + i * 8 + j]
        _transform(tiles, 0)
        for y in range(low, high):
            place = (y * ((new_width + 7) // 8) + group) * 8
            top = max(row, y_first[y])
            for sample in range(top, min(row + 8, y_first[y] + y_count)):
                weight, line = y_weights[y, sample - y_first[y]], (sample - row) * 8
                for i in range(8):
                    plane[place + i] += weight * tiles[line + i]


@inlined
def _filter(work: Any, at: int, weights: Any, tiles: Any, place: int) -> None:
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    for weight in weights:
        s0 += weight * work[at]
        s1 += weight * work[at + 1]
        s2 += weight * work[at + 2]
        s3 += weight * work[at + 3]
        s4 += weight * work[at + 4]
        s5 += weight * work[at + 5]
        s6 += weight * work[at + 6]
        s7 += weight * work[at + 7]
        at += 8
    tiles[place] = s0
    tiles[place + 1] = s1
    tiles[place + 2] = s2
    tiles[place + 3] = s3
    tiles[place + 4] = s4
    tiles[place + 5] = s5
    tiles[place + 6] = s6
    tiles[place + 7] = s7


@inlined
def _transform(a: Any, at: int) -> None:
    """Eight inverse cosine transforms side by side: of `a[at + 8 * k + i]` along k, in place, for each i."""
    for i in range(at, at + 8):
        even0, even1 = a[i] + a[i + 32], a[i] - a[i + 32]
        even3 = a[i + 16] + a[i + 48]
        even2 = (a[i + 16] - a[i + 48]) * _SQRT2 - even3
        p0, p3, p1, p2 = even0 + even3, even0 - even3, even1 + even2, even1 - even2
        z13, z10 = a[i + 40] + a[i + 24], a[i + 40] - a[i + 24]
        z11, z12 = a[i + 8] + a[i + 56], a[i + 8] - a[i + 56]
        q7 = z11 + z13
        z5 = (z10 + z12) * _C1
        q6 = z5 - z10 * _C3 - q7
        q5 = (z11 - z13) * _SQRT2 - q6
        q4 = z5 - z12 * _C2 - q5
        a[i], a[i + 56] = p0 + q7, p0 - q7
        a[i + 8], a[i + 48] = p1 + q6, p1 - q6
        a[i + 16], a[i + 40] = p2 + q5, p2 - q5
        a[i + 24], a[i + 32] = p3 + q4, p3 - q4


@kernel
def write_pixels(planes: Any, is_color: bool, shape: Any, steps: Any, out: Any) -> None:
    """Turns planes into RGB pixels.

    **Arguments:** `planes`: float32 `[3, …]`, of `add_blocks`. `shape`: height and width of the target as it is stored.
    `steps`: place in `out` of its first pixel, and from one of its rows and pixels to the next. `out`: uint8, flat.
    """
    height, width = shape
    start, row_step, step = steps
    line = (width + 7) // 8 * 8
    for y in range(height):
        at = start + y * row_step
        for x in range(width):
            light, blue, red = planes[0, y * line + x] + _LEVEL, np.float32(0), np.float32(0)
            if is_color:
                blue, red = planes[1, y * line + x], planes[2, y * line + x]
            place = at + x * step
            out[place] = np.uint8(min(max(light + _RED * red, _ZERO), _TOP))
            out[place + 1] = np.uint8(min(max(light + _GREEN_B * blue + _GREEN_R * red, _ZERO), _TOP))
            out[place + 2] = np.uint8(min(max(light + _BLUE * blue, _ZERO), _TOP))
