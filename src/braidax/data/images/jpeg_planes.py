# LEAD: read LEAD_NOTE.md in this folder before going on with this file.
"""Kernels from the coefficients of JPEG blocks to the pixels of a resized image.

Source: ITU-T T.81 (1992), annex A; Arai, Agui, Nakajima, "A fast DCT-SQ scheme for images" (Trans. IEICE E71, 1988),
for the scales; JFIF 1.02 for the colors.
"""

import math
from typing import Any

import numpy as np

from braidax.data.compiled import add_eight, kernel, start_eight, transform_eight, turn_eight
from braidax.data.images.jpeg_entropy import BLOCK
from braidax.data.images.jpeg_header import ZIGZAG_U, ZIGZAG_V

_SCALES = np.array([1 if k == 0 else math.cos(k * math.pi / 16) * math.sqrt(2) for k in range(8)])
_STEPS = _SCALES[ZIGZAG_U] * _SCALES[ZIGZAG_V] / 8
_PLACES = ZIGZAG_U * 8 + ZIGZAG_V
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
    count = min(math.ceil(2 * support), high - low)
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
        start_eight(coefficients, block * BLOCK, steps, work, block * 64)
    tiles, num_groups = np.empty(128, np.float32), (new_width + 7) // 8
    for group in range(num_groups):
        tiles[64:] = 0
        for i in range(8):
            x = min(group * 8 + i, new_width - 1)
            for t in range(x_weights.shape[1]):
                add_eight(tiles, 64 + i * 8, x_weights[x, t], work, (x_first[x] + t) * 8)
        turn_eight(tiles, 64, tiles, 0)
        transform_eight(tiles, 0)
        for y in range(low, high):
            place = (y * num_groups + group) * 8
            for sample in range(max(row, y_first[y]), min(row + 8, y_first[y] + y_count)):
                add_eight(plane, place, y_weights[y, sample - y_first[y]], tiles, (sample - row) * 8)


@kernel
def write_pixels(planes: Any, is_color: bool, shape: Any, steps: Any, out: Any) -> None:
    """Turns planes into RGB pixels.

    **Arguments:** `planes`: float32 `[3, …]`, of `add_blocks`. `shape`: height and width of the target as it is stored.
    `steps`: place in `out` of its first pixel, and from one of its rows and pixels to the next. `out`: uint8, flat.
    """
    height, width = shape
    start, row_step, step = steps
    line = (width + 7) // 8 * 8
    colors = np.empty((3, line), np.uint8)
    for y in range(height):
        lights = planes[0, y * line : (y + 1) * line]
        if is_color:
            _to_colors(lights, planes[1, y * line : (y + 1) * line], planes[2, y * line : (y + 1) * line], colors)
        else:
            for x in range(line):
                light = np.uint8(min(max(lights[x] + _LEVEL, _ZERO), _TOP))
                colors[0, x], colors[1, x], colors[2, x] = light, light, light
        place = start + y * row_step
        for x in range(width):
            out[place] = colors[0, x]
            out[place + 1] = colors[1, x]
            out[place + 2] = colors[2, x]
            place += step


@kernel
def _to_colors(lights: Any, blues: Any, reds: Any, colors: Any) -> None:
    for x in range(len(lights)):
        colors[0, x] = np.uint8(min(max(lights[x] + _LEVEL + _RED * reds[x], _ZERO), _TOP))
    for x in range(len(lights)):
        green = lights[x] + _LEVEL + _GREEN_B * blues[x] + _GREEN_R * reds[x]
        colors[1, x] = np.uint8(min(max(green, _ZERO), _TOP))
    for x in range(len(lights)):
        colors[2, x] = np.uint8(min(max(lights[x] + _LEVEL + _BLUE * blues[x], _ZERO), _TOP))
