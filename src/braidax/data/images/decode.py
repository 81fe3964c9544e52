"""Encoded images decoded in windows: the JPEG files of every day by our own kernel, all others by OpenCV.

Both run without the GIL. The kernel takes a whole window in one call and resizes while it decodes; what it does not
know, or what looks damaged to it, is left to OpenCV, which decides.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray

from braidax.errors import ArgumentError, RecordError, import_extra
from braidax.spans import span

Decode = Literal["fast", "exact"]
"""How images are resized. `"fast"`: JPEG in one go with decoding; `"exact"`: decoded in full first."""

Choose = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Chooses crops: from sizes, int64 `[n, 2]`, height and width, to boxes, int64 `[n, 4]`: top, left, height, width."""


def decode_images(
    payloads: Sequence[Any],
    out: UInt8[np.ndarray, "n h w 3"],
    *,
    where: Callable[[int], str],
    choose: Choose | None = None,
    decode: Decode = "fast",
    resizes: bool = True,
) -> None:
    """Decodes images as RGB, upright, into place.

    **Arguments:** `payloads`: bytes-like, the encoded images. `out`: uint8 `[n, h, w, 3]`, filled. `where`: names a
    payload for errors. `choose`: the crops; whole images by default. `resizes`: whether a crop of another size is
    resized, or an error.

    **Raises:** `RecordError` for an image that is damaged or of another size; `MissingExtra`.
    """
    found, done = np.zeros((len(out), 2), np.int64), np.zeros(len(out), np.bool_)
    loaded: dict[int, NDArray[np.uint8]] = {}
    lengths = [_num_bytes(payload, where(place)) for place, payload in enumerate(payloads)]
    with span("decode", "images", num_bytes=sum(lengths)):
        joined = _joined(payloads, lengths) if decode == "fast" and (resizes or choose is not None) else None
        if joined is not None:
            _kernels().sizes(*joined, found)
        if choose is not None:
            for place in np.flatnonzero(found[:, 0] == 0).tolist():
                loaded[place] = _load(payloads[place], where(place))
                found[place] = loaded[place].shape[:2]
        boxes = choose(found) if choose is not None else np.concatenate([np.zeros_like(found), found], axis=1)
        boxes = np.ascontiguousarray(boxes, np.int64)
        if joined is not None:
            whole = (boxes[:, 2:] == found).all(axis=1) & (found == out.shape[1:3]).all(axis=1)
            done[:] = (found[:, 0] > 0) & ~whole
            done[list(loaded)] = False
            _kernels().decode(*joined, boxes, np.zeros(len(out), np.bool_), out, done)
        for place in np.flatnonzero(~done).tolist():
            image = loaded.pop(place, None)
            image = _load(payloads[place], where(place)) if image is None else image
            box = boxes[place] if choose is not None else np.array([0, 0, *image.shape[:2]])
            _place(image, box, out[place : place + 1], resizes, where(place))


def check_decode(decode: str) -> None:
    """Raises `ArgumentError` unless it is one of the two ways to decode."""
    if decode not in ("fast", "exact"):
        raise ArgumentError(f'decode={decode!r}: expected "fast" or "exact"')


def compile_kernels() -> None:
    """Compiles what decodes, or finds that something is missing, before the first batch."""
    _cv2()
    kernels = _kernels()
    joined, one = _joined([b"none"], [4]), np.zeros(1, np.bool_)
    kernels.sizes(*joined, np.zeros((1, 2), np.int64))
    kernels.decode(*joined, np.zeros((1, 4), np.int64), one, np.zeros((1, 1, 1, 3), np.uint8), one)
    _box_kernels().resize_boxes(
        np.zeros((1, 2, 2, 3), np.uint8), np.array([[0, 0, 2, 2]]), np.zeros((1, 1, 1, 3), np.uint8)
    )


def image_size(payload: Any, where: str) -> tuple[int, int]:
    """Returns height and width of an encoded image."""
    height, width, _ = _load(payload, where).shape
    return height, width


def _place(
    image: NDArray[np.uint8], box: Int64[np.ndarray, " 4"], slot: NDArray[np.uint8], resizes: bool, where: str
) -> None:
    top, left, height, width = box.tolist()
    if (height, width) == slot.shape[1:3]:
        slot[0] = image[top : top + height, left : left + width]
    elif resizes:
        _box_kernels().resize_boxes(image[None], box[None], slot)
    else:
        raise RecordError(
            f"{where}: the image is {height}×{width} pixels (height×width), expected {slot.shape[1]}×{slot.shape[2]} "
            "as the first; give image_size=(height, width), or size= where it is decoded"
        )


def _load(payload: Any, where: str) -> NDArray[np.uint8]:
    cv2, num_bytes = _cv2(), _num_bytes(payload, where)
    try:
        image = cv2.imdecode(np.frombuffer(payload, np.uint8), cv2.IMREAD_COLOR_RGB) if num_bytes else None
    except cv2.error:  # what it raises for a header that promises too many pixels, and the like
        image = None
    if image is None:
        raise RecordError(
            f"{where}: the image of {num_bytes:,} bytes is truncated or corrupt, or of no known format; "
            "expected JPEG, PNG, WebP or BMP: restore or remove it"
        )
    return image


def _joined(payloads: Sequence[Any], lengths: list[int]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    joined = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    data = np.frombuffer(joined, np.uint8) if any(lengths) else np.zeros(0, np.uint8)
    data.setflags(write=False)  # kernels are compiled for what may not be written
    return data, np.cumsum([0, *lengths])


def _num_bytes(payload: Any, where: str) -> int:
    try:
        return memoryview(payload).nbytes
    except TypeError as error:
        raise RecordError(
            f"{where}: holds a {type(payload).__name__}, expected the bytes of an encoded image; name the leaf of "
            "images with leaf=, or leave the record out"
        ) from error


@functools.cache
def _cv2() -> ModuleType:
    return import_extra("cv2", "images", purpose="decoding images")


def _kernels() -> Any:
    from braidax.data.images import jpeg  # imports numba, which takes a while and may be missing

    return jpeg


def _box_kernels() -> Any:
    from braidax.data.images import boxes

    return boxes
