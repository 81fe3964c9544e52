"""Kernels on whole windows of images in memory: resized, crops resized or copied, images mirrored; without the GIL.

The filter of a resize is Pillow's `BILINEAR`: a triangle as wide as the scale, so enlarging interpolates between two
pixels and shrinking averages all pixels that a target pixel covers. Results are Pillow's within one of 255 steps.

Imports numba, which takes a while and may be missing: so it is imported where a kernel is needed first.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray

from braidax.data.transforms.images.compiled import kernel
from braidax.errors import ArgumentError

_ONE = 1 << 15  # weights are fixed-point numbers with 15 fractional bits
_HALF = np.float32(0.5)


def resize(
    images: UInt8[np.ndarray, "n h w c"],
    out: UInt8[np.ndarray, "m h2 w2 c"],
    indices: Int64[np.ndarray, " m"] | None = None,
) -> None:
    """Resizes images into place.

    **Arguments:** `images`: uint8 `[n, h, w, c]`, C-contiguous. `out`: uint8 `[m, h2, w2, c]`, C-contiguous, filled.
    `indices`: int64 `[m]`, which image goes to which place of `out`; all in order by default (`m == n`).

    **Raises:** `ArgumentError` if dtypes or shapes do not fit; `MissingExtra` without numba.
    """
    _check(images, out)
    if indices is None:
        indices = np.arange(len(images), dtype=np.int64)
    if len(indices) != len(out):
        raise ArgumentError(f"resize got {len(indices)} indices for {len(out)} places in out; give one for each place")
    if len(indices) and (indices.min() < 0 or indices.max() >= len(images)):
        wrong = indices[(indices < 0) | (indices >= len(images))][0]
        raise ArgumentError(f"resize got the index {wrong} for {len(images)} images; use 0 to {len(images) - 1}")
    _resize(
        np.ascontiguousarray(images),
        indices,
        out,
        _taps(images.shape[2], out.shape[2], images.shape[3]),
        _taps(images.shape[1], out.shape[1], 1),
    )


def _check(images: NDArray[Any], out: NDArray[Any]) -> None:
    if images.dtype != np.uint8 or out.dtype != np.uint8:
        raise ArgumentError(
            f"resize takes uint8 images, got images={images.dtype} and out={out.dtype}; convert them first"
        )
    if images.ndim != 4 or out.ndim != 4 or images.shape[3] != out.shape[3]:
        raise ArgumentError(
            f"resize takes [n, height, width, channels] with equal channels, got images={images.shape}, out={out.shape}"
        )
    if 0 in (*images.shape[1:], *out.shape[1:]):
        raise ArgumentError(
            f"resize got images={images.shape}, out={out.shape}; height, width and channels must be at least 1"
        )
    if not out.flags.c_contiguous:
        raise ArgumentError(f"resize fills out in place, so out={out.shape} must be C-contiguous; resize into a copy")


class _Taps(NamedTuple):
    """How the target values of one dim come from the source's; a value is one channel of a pixel.

    With two taps: `near`, `far` (uint32 `[length]`), the source values on both sides, and `share` (int16 `[length]`),
    the weight of the farther in 1/65536, which is at most a half, so that 16-bit products suffice. With another number:
    `first` (uint32 `[length]`) and `weights` (int32 `[taps, length]`) of that value and of those a pixel further on.
    """

    near: NDArray[np.uint32]
    far: NDArray[np.uint32]
    share: NDArray[np.int16]
    first: NDArray[np.uint32]
    weights: NDArray[np.int32]


@functools.lru_cache(maxsize=4096)
def _taps(size: int, new_size: int, channels: int) -> _Taps:
    scale = size / new_size
    support = max(scale, 1.0)
    centers = (np.arange(new_size) + 0.5) * scale
    first = np.clip(np.floor(centers - support + 0.5), 0, size - 1).astype(np.int64)
    last = np.clip(np.floor(centers + support + 0.5), 1, size).astype(np.int64)
    taps = int((last - first).max())
    first = np.minimum(first, size - taps)
    pixels = first[:, None] + np.arange(taps)
    weights = np.maximum(0.0, 1.0 - np.abs(pixels + 0.5 - centers[:, None]) / support)
    weights /= weights.sum(axis=1, keepdims=True)
    fixed = np.rint(weights * _ONE).astype(np.int32)
    fixed[np.arange(new_size), fixed.argmax(axis=1)] += _ONE - fixed.sum(axis=1)
    side = weights[:, -1] > weights[:, 0]
    share = np.minimum(np.rint(weights.min(axis=1) * (1 << 16)), (1 << 15) - 1)

    def values(pixel: NDArray[np.int64]) -> NDArray[np.uint32]:
        return (pixel[:, None] * channels + np.arange(channels)).ravel().astype(np.uint32)

    return _Taps(
        near=values(first + side),
        far=values(first + 1 - side),
        share=np.repeat(share, channels).astype(np.int16),
        first=values(first),
        weights=np.ascontiguousarray(np.repeat(fixed, channels, axis=0).T),
    )


@kernel
def _resize(images: Any, indices: Any, out: Any, x_taps: Any, y_taps: Any) -> None:
    height, channels = images.shape[1], np.uint32(images.shape[3])
    length, new_height = x_taps.first.shape[0], y_taps.first.shape[0]
    rows = np.empty((height, length), np.int16)  # 8 integer and 7 fractional bits
    sums = np.empty(length, np.int32)
    for n in range(indices.shape[0]):
        image = images[indices[n]].reshape(height, -1)
        target_image = out[n].reshape(new_height, length)
        for y in range(height):
            pixels, row = image[y], rows[y]
            if x_taps.weights.shape[0] == 2:
                for i in range(length):
                    near = np.int32(pixels[x_taps.near[i]])
                    step = (np.int32(pixels[x_taps.far[i]]) - near) * np.int32(x_taps.share[i])
                    row[i] = np.int16((near << 7) + ((step + np.int32(256)) >> 9))
            else:
                sums[:] = 128
                for t in range(x_taps.weights.shape[0]):
                    for i in range(length):
                        sums[i] += np.int32(pixels[x_taps.first[i] + np.uint32(t) * channels]) * x_taps.weights[t, i]
                for i in range(length):
                    row[i] = np.int16(sums[i] >> 8)
        for y in range(new_height):
            target = target_image[y]
            if y_taps.weights.shape[0] == 2:
                near_row, far_row, share = rows[y_taps.near[y]], rows[y_taps.far[y]], y_taps.share[y]
                for i in range(length):
                    move = np.int32(np.int16(far_row[i] - near_row[i])) * np.int32(share)
                    target[i] = np.uint8(np.int16(near_row[i] + np.int16(move >> 16) + np.int16(64)) >> 7)
            else:
                sums[:] = 1 << 21
                for t in range(y_taps.weights.shape[0]):
                    row, factor = rows[y_taps.first[y] + np.uint32(t)], y_taps.weights[t, y]
                    for i in range(length):
                        sums[i] += np.int32(row[i]) * factor
                for i in range(length):
                    target[i] = np.uint8(sums[i] >> 22)


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
