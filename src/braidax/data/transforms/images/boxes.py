"""Kernels on windows of images in memory: crops resized, crops copied, images mirrored."""

import math
from typing import Any

import numpy as np

from braidax.data.transforms.images.compiled import kernel

_HALF = np.float32(0.5)


@kernel
def resize_boxes(images: Any, boxes: Any, out: Any) -> None:
    """Resizes one crop of each image by the filter of `resize`.

    **Arguments:** `images`: uint8 `[n, h, w, c]`. `boxes`: int64 `[n, 4]`: top, left, height, width, inside the image.
    `out`: uint8 `[n, h2, w2, c]`, filled.
    """
    channels, new_height, new_width = images.shape[3], out.shape[1], out.shape[2]
    longest = (images.shape[2] * channels + 7) // 8 * 8
    rows, columns = np.empty(8 * longest, np.float32), np.empty(8 * longest, np.float32)
    sums = np.empty(8, np.float32)
    for n in range(len(images)):
        top, left, height, width = boxes[n, 0], boxes[n, 1], boxes[n, 2], boxes[n, 3]
        x_first, x_weights = _fill_taps(width, new_width)
        y_first, y_weights = _fill_taps(height, new_height)
        length = (width * channels + 7) // 8 * 8
        for first in range(0, new_height, 8):  # of eight rows of the target, side by side
            num_rows = min(8, new_height - first)
            for i in range(num_rows):
                y = first + i
                _add_rows(images[n], top + y_first[y], left, width, y_weights[y], rows, i * length)
            for i in range(0, length, 8):
                _turn_rows(rows, i, length, columns)
            for x in range(new_width):
                for c in range(channels):
                    sums[:] = _HALF
                    for t in range(x_weights.shape[1]):
                        weight, at = x_weights[x, t], ((x_first[x] + t) * channels + c) * 8
                        for i in range(8):
                            sums[i] += weight * columns[at + i]
                    for i in range(num_rows):
                        out[n, first + i, x, c] = np.uint8(sums[i])


@kernel
def _fill_taps(length: int, new_length: int) -> Any:
    """Says how new values come from old ones along one dim: int64 `[new_length]`, the first of them, and float32
    `[new_length, taps]`, the weights."""
    step = length / new_length
    support = max(step, 1.0)
    count = min(math.ceil(2 * support), length)
    first, weights = np.empty(new_length, np.int64), np.zeros((new_length, count), np.float32)
    for i in range(new_length):
        center = (i + 0.5) * step
        lowest = min(max(math.floor(center - support + 0.5), 0), length - count)
        first[i] = lowest
        total = 0.0
        for t in range(count):
            total += max(0.0, 1.0 - abs(lowest + t + 0.5 - center) / support)
        for t in range(count):
            weights[i, t] = max(0.0, 1.0 - abs(lowest + t + 0.5 - center) / support) / total
    return first, weights


@kernel
def _add_rows(image: Any, first: int, left: int, width: int, weights: Any, rows: Any, place: int) -> None:
    length = width * image.shape[2]
    target = rows[place : place + length]
    target[:] = 0
    for t in range(len(weights)):
        line = image[first + t, left : left + width].reshape(-1)
        weight = weights[t]
        for i in range(length):
            target[i] += weight * np.float32(line[i])


@kernel
def _turn_rows(rows: Any, at: int, length: int, columns: Any) -> None:
    """Eight values of eight rows become eight columns, side by side."""
    for i in range(8):
        for j in range(8):
            columns[(at + j) * 8 + i] = rows[i * length + at + j]


@kernel
def cut(images: Any, corners: Any, out: Any) -> None:
    """Copies a crop of each image; what lies beyond the image is 0.

    **Arguments:** `images`: `[n, h, w, c]`. `corners`: int64 `[n, 2]`, top and left. `out`: `[n, h2, w2, c]`, filled.
    """
    height, width, channels = images.shape[1], images.shape[2], images.shape[3]
    for n in range(len(images)):
        top, left = corners[n, 0], corners[n, 1]
        first, stop = max(0, -left), max(0, min(out.shape[2], width - left))
        for y in range(out.shape[1]):
            if not 0 <= top + y < height or stop <= first:
                out[n, y] = 0
                continue
            out[n, y, :first] = 0
            out[n, y, stop:] = 0
            source, target = images[n, top + y].reshape(-1), out[n, y].reshape(-1)
            for i in range(first * channels, stop * channels):
                target[i] = source[left * channels + i]


@kernel
def mirror(images: Any, chosen: Any) -> None:
    """Mirrors some images in place, left to right.

    **Arguments:** `images`: `[n, h, w, c]`. `chosen`: bool `[n]`.
    """
    width, channels = images.shape[2], images.shape[3]
    for n in range(len(images)):
        if chosen[n]:
            for y in range(images.shape[1]):
                row = images[n, y]
                for x in range(width // 2):
                    for c in range(channels):
                        row[x, c], row[width - 1 - x, c] = row[width - 1 - x, c], row[x, c]
