"""Encoded images decoded in windows: JPEG files by libjpeg-turbo at the scale that is needed, all others by OpenCV.

Both run without the GIL. JPEG files that OpenCV reads better go there too: CMYK, and those that have to be turned. WebP
files are turned here: OpenCV does so only where their Exif data begin without the mark that JPEG files have.
"""

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray

from braidax.data.transforms.images.exif import is_upright, upright, webp_orientation
from braidax.data.transforms.images.headers import promised_size
from braidax.errors import ArgumentError, RecordError, import_extra
from braidax.spans import span

Decode = Literal["fast", "exact"]
"""How images are resized. `"fast"`: JPEG decoded at a reduced scale where that suffices; `"exact"`: always in full."""

Choose = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Chooses crops: from sizes, int64 `[n, 2]`, height and width, to boxes, int64 `[n, 4]`: top, left, height, width."""

_Name = Callable[[], str]  # of an image, for errors

_JPEG = b"\xff\xd8"
_SMALL = 64  # pixels on the longer side: decoding all of them costs nothing
MAX_PIXELS = 1 << 27  # of an image, by default: 384 MiB of memory for each thread that decodes
_MOST_SIDE = 1 << 15  # of what OpenCV interpolates in


def decode_images(
    payloads: Sequence[Any],
    out: UInt8[np.ndarray, "n h w 3"],
    *,
    where: Callable[[int], str],
    choose: Choose | None = None,
    decode: Decode = "fast",
    resizes: bool = True,
    max_pixels: int = MAX_PIXELS,
) -> None:
    """Decodes images as RGB, upright, into place.

    **Arguments:** `payloads`: bytes-like, the encoded images. `out`: uint8 `[n, h, w, 3]`, filled. `where`: names a
    payload for errors. `choose`: the crops; whole images by default. `resizes`: whether a crop of another size is
    resized, or an error. `max_pixels`: of an image; what promises more is an error before it is decoded.

    **Raises:** `RecordError` for an image that is damaged or of another size; `MissingExtra`.
    """
    names = [functools.partial(where, place) for place in range(len(payloads))]
    lengths = [_num_bytes(payload, name) for payload, name in zip(payloads, names, strict=True)]
    with span("decode", "images", num_bytes=sum(lengths)):
        for payload, name in zip(payloads, names, strict=True):
            _check_pixels(payload, max_pixels, name)
        found = np.array([_jpeg_size(payload) for payload in payloads], np.int64).reshape(-1, 2)
        ours, loaded = found[:, 0] > 0, dict[int, NDArray[np.uint8]]()
        if choose is not None:
            for place in np.flatnonzero(~ours).tolist():
                loaded[place] = _load(payloads[place], names[place])
                found[place] = loaded[place].shape[:2]
        boxes = choose(found) if choose is not None else np.concatenate([np.zeros_like(found), found], axis=1)
        boxes, room = np.ascontiguousarray(boxes, np.int64), _Room()
        fits = (found == out.shape[1:3]).all(axis=1) & (choose is None and out.flags.c_contiguous)
        for place, (payload, name, is_fitting) in enumerate(zip(payloads, names, fits.tolist(), strict=True)):
            box, slot = boxes[place], out[place]
            if is_fitting:
                _decode_jpeg(payload, out.shape[1:3], 8, slot, name)
                continue
            if not ours[place]:
                image = loaded.pop(place, None)
                image = _load(payload, name) if image is None else image
                box = box if choose is not None else np.array([0, 0, *image.shape[:2]])
                _check_box(box, slot, resizes, name)
                _resize_exactly(image, box, slot)
                continue
            _check_box(box, slot, resizes, name)
            size = (int(found[place, 0]), int(found[place, 1]))
            fast = decode == "fast" and max(size) > _SMALL
            eighths = _eighths(box, slot) if fast else 8
            image = _decode_jpeg(payload, size, eighths, room, name)
            if fast:
                _resize_fast(image, box * (eighths / 8), slot)
            else:
                _resize_exactly(image, box, slot)


def check_decode(decode: str) -> None:
    """Raises `ArgumentError` unless it is one of the two ways to decode."""
    if decode not in ("fast", "exact"):
        raise ArgumentError(f'decode={decode!r}: expected "fast" or "exact"')


def compile_kernels() -> None:
    """Compiles what resizes, or finds that something is missing, before the first batch."""
    _cv2()
    _simplejpeg()
    _kernels().resize_boxes(
        np.zeros((1, 2, 2, 3), np.uint8), np.array([[0, 0, 2, 2]]), np.zeros((1, 1, 1, 3), np.uint8)
    )


def image_size(payload: Any, where: str, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Returns height and width of an encoded image, upright, after decoding it once to see that it is one."""
    name = functools.partial(str, where)
    _num_bytes(payload, name)
    _check_pixels(payload, max_pixels, name)
    size = _jpeg_size(payload)
    if size != (0, 0):
        _decode_jpeg(payload, size, 8, _Room(), name)
        return size
    height, width, _ = _load(payload, name).shape
    return height, width


class _Room:
    """Memory that the images of a window are decoded into, one after the other."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        if len(self._bytes) < num_bytes:
            self._bytes = np.empty(num_bytes, np.uint8)
        return self._bytes


def _jpeg_size(payload: Any) -> tuple[int, int]:
    """Returns height and width of a JPEG file that libjpeg-turbo decodes to upright RGB, or (0, 0) for all others."""
    data = memoryview(payload).cast("B")
    if data[:2].tobytes() != _JPEG:
        return 0, 0
    try:
        height, width, colors, _ = _simplejpeg().decode_jpeg_header(data)
    except ValueError:
        return 0, 0
    known = colors in ("YCbCr", "RGB", "Gray") and is_upright(data)
    return (height, width) if known else (0, 0)


def _check_pixels(payload: Any, max_pixels: int, where: _Name) -> None:
    """Raises `RecordError` for an image whose header promises more pixels than may be decoded."""
    height, width = promised_size(memoryview(payload).cast("B"))
    if height * width > max_pixels:
        raise RecordError(
            f"{where()}: the image is said to have {height}×{width} = {height * width:,} pixels, more than max_pixels="
            f"{max_pixels:,}; raise max_pixels= of braidax.data.decoded if it is not damaged, or remove it"
        )


def _eighths(box: Int64[np.ndarray, " 4"], slot: NDArray[np.uint8]) -> int:
    """Returns the smallest scale, in eighths, at which a part of an image is at least as large as its target."""
    return min(8, max(-(-8 * slot.shape[dim] // int(box[2 + dim])) for dim in (0, 1)))


def _decode_jpeg(
    payload: Any, size: tuple[int, ...], eighths: int, room: "_Room | NDArray[np.uint8]", where: _Name
) -> NDArray[np.uint8]:
    """Returns the image at a scale: in memory of the room, or in the array that is given, which it fills."""
    height, width = (-(-length * eighths // 8) for length in size)
    try:
        return _simplejpeg().decode_jpeg(
            payload,
            min_height=height,
            min_width=width,
            min_factor=1,
            buffer=room.take(3 * height * width) if isinstance(room, _Room) else room,
            strict=True,  # or what is missing would be gray
        )
    except ValueError as error:
        raise _damaged(payload, where, f" ({error})") from error


def _check_box(box: Int64[np.ndarray, " 4"], slot: NDArray[np.uint8], resizes: bool, where: _Name) -> None:
    height, width = box[2:].tolist()
    if not resizes and (height, width) != slot.shape[:2]:
        raise RecordError(
            f"{where()}: the image is {height}×{width} pixels (height×width), expected {slot.shape[0]}×{slot.shape[1]} "
            "as the first; give image_size=(height, width), or size= where it is decoded"
        )


def _resize_exactly(image: NDArray[np.uint8], box: Int64[np.ndarray, " 4"], slot: NDArray[np.uint8]) -> None:
    top, left, height, width = box.tolist()
    if (height, width) == slot.shape[:2]:
        slot[:] = image[top : top + height, left : left + width]
    else:
        _kernels().resize_boxes(image[None], box[None], slot[None])


def _resize_fast(image: NDArray[np.uint8], box: NDArray[np.float64], slot: NDArray[np.uint8]) -> None:
    """Interpolates between neighbors where that is enough; `box` is in pixels of `image` and may cut through them."""
    top, left, height, width = box.tolist()
    new_height, new_width, _ = slot.shape
    first_row, first_column = math.floor(top), math.floor(left)
    last_row, last_column = min(math.ceil(top + height), len(image)), min(math.ceil(left + width), image.shape[1])
    part, cv2 = image[first_row:last_row, first_column:last_column], _cv2()
    row_step, column_step = height / new_height, width / new_width
    if max(row_step, column_step) >= 2 or max(*part.shape, *slot.shape) >= _MOST_SIDE:
        whole = np.array([first_row, first_column, *part.shape[:2]])
        _resize_exactly(image, whole, slot)
    elif part.shape == slot.shape and box.tolist() == [first_row, first_column, new_height, new_width]:
        slot[:] = part
    elif (first_row, first_column) == (top, left):
        part = part[: round(height), : round(width)]  # of which these steps make as many pixels as the slot has
        cv2.resize(part, None, slot, 1 / column_step, 1 / row_step, cv2.INTER_LINEAR)
    else:
        x, y = left - first_column + column_step / 2 - 0.5, top - first_row + row_step / 2 - 0.5
        steps = np.array([[column_step, 0, x], [0, row_step, y]])
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        cv2.warpAffine(part, steps, (new_width, new_height), slot, flags, cv2.BORDER_REPLICATE)


def _load(payload: Any, where: _Name) -> NDArray[np.uint8]:
    cv2, data = _cv2(), memoryview(payload).cast("B")
    is_webp = data[:4].tobytes() == b"RIFF" and data[8:12].tobytes() == b"WEBP"
    flags = cv2.IMREAD_COLOR_RGB | (cv2.IMREAD_IGNORE_ORIENTATION if is_webp else 0)
    try:
        with _quiet():
            image = cv2.imdecode(np.frombuffer(payload, np.uint8), flags) if data.nbytes else None
    except cv2.error:  # what it raises for a header that promises too many pixels, and the like
        image = None
    if image is None:
        raise _damaged(payload, where, "")
    return upright(image, webp_orientation(data)) if is_webp else image


def _damaged(payload: Any, where: _Name, why: str) -> RecordError:
    return RecordError(
        f"{where()}: the image of {memoryview(payload).nbytes:,} bytes is truncated or corrupt, or of no known format"
        f"{why}; expected JPEG, PNG, WebP or BMP: restore or remove it"
    )


def _num_bytes(payload: Any, where: _Name) -> int:
    try:
        return memoryview(payload).nbytes
    except TypeError as error:
        raise RecordError(
            f"{where()}: holds a {type(payload).__name__}, expected the bytes of an encoded image; name the leaf of "
            "images with leaf=, or leave the record out"
        ) from error


@functools.cache
def _cv2() -> ModuleType:
    return import_extra("cv2", "images", purpose="decoding images")


@functools.cache
def _quiet() -> Any:
    from braidax.data.transforms.images.quiet import Quiet  # at the first image that needs it

    return Quiet(_cv2())


@functools.cache
def _simplejpeg() -> ModuleType:
    return import_extra("simplejpeg", "images", purpose="decoding JPEG images")


def _kernels() -> Any:
    from braidax.data.transforms.images import kernels  # imports numba, which takes a while and may be missing

    return kernels
