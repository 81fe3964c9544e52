"""Antialiased bilinear resize of whole windows of images, compiled, without the GIL.

The filter is Pillow's `BILINEAR`: a triangle as wide as the scale, so enlarging interpolates between two pixels and
shrinking averages all pixels that a target pixel covers. Results agree with Pillow's within one of 255 steps.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray

from braidax.errors import ArgumentError

_ONE = 1 << 15  # weights are fixed-point numbers with 15 fractional bits


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
    kernel = _compiled()
    kernel(
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


@functools.cache
def _compiled() -> Callable[..., None]:
    from braidax.data.transforms.images.compiled import kernel  # imports numba, which takes a while and may be missing

    return kernel(_kernel)


def _kernel(images: Any, indices: Any, out: Any, x_taps: Any, y_taps: Any) -> None:
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
