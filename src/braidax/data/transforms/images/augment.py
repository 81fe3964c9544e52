"""Sources whose images are cropped and mirrored, at random or at the center.

What is random in a sample depends on seed, epoch and index alone, and on which of several augmentations draws it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from braidax.data.sampling.draws import Draws
from braidax.data.source import Indices, Source
from braidax.data.transforms.images.decoded import DecodedSource, encoded
from braidax.data.transforms.wrapping import (
    Drawing,
    Scratch,
    Wrapping,
    check_size,
    image_spec,
    leaf_spec,
    place_of,
    stamp_of_fields,
)
from braidax.errors import ArgumentError, RecordError
from braidax.spans import span

_ATTEMPTS = 10


def random_resized_crop(
    source: Source,
    size: tuple[int, int],
    *,
    leaf: str = "image",
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Source:
    """Returns a source with a random part of each image, resized; another part in every epoch.

    Where images are still encoded (bytes, or an image folder opened without `image_size`), the part is chosen from the
    size in the file's header, and the image decoded at the smallest scale at which the part suffices.

    **Arguments:** `source`: samples are mappings; `leaf` is uint8 `[height, width, channels]`, or bytes. `size`: the
    new `(height, width)` in pixels. `scale`: bounds of the part's area as a fraction of the image's. `ratio`: bounds
    of its width over its height, before it is resized.

    **Raises:** `ArgumentError` if `leaf` holds no images, or `size`, `scale` or `ratio` is wrong; `MissingExtra`.

    **Source:** Szegedy et al., "Going deeper with convolutions" (CVPR 2015), section 6; ten attempts and then the
    largest central part, as torchvision's `RandomResizedCrop`.
    """
    check_size(size)
    for name, bounds in {"scale": scale, "ratio": ratio}.items():
        if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
            raise ArgumentError(f"{name}={bounds!r}: expected (least, most), positive, such as {name}=(0.5, 1)")
    if scale[1] > 1:
        raise ArgumentError(f"scale={scale!r}: a part cannot be larger than the image; expected at most 1")
    inner = _ready(source, leaf, size, "random_resized_crop")
    return _RandomResizedCrop(inner, place_of(inner, "crop"), leaf=leaf, size=size, scale=scale, ratio=ratio)


def center_crop(source: Source, size: tuple[int, int], *, leaf: str = "image", fraction: float | None = None) -> Source:
    """Returns a source with the central part of each image.

    **Arguments:** `source`: samples are mappings; `leaf` is uint8 `[height, width, channels]`, or bytes. `size`: the
    new `(height, width)` in pixels. `fraction`: None cuts out `size` pixels as they are; a number takes the largest
    central part of the same proportions, makes it smaller by that factor, and resizes it: 0.875 is the 224 pixels out
    of 256 that models are evaluated with.

    **Raises:** `ArgumentError` if `leaf` holds no images, or `size` or `fraction` is wrong; `RecordError` for an image
    smaller than `size` when there is no `fraction`; `MissingExtra`.
    """
    check_size(size)
    if fraction is not None and not 0 < fraction <= 1:
        raise ArgumentError(f"fraction={fraction}: expected more than 0 and at most 1, such as 0.875")
    inner = _ready(source, leaf, size, "center_crop")
    if fraction is None and inner is source:
        height, width, _ = inner.sample_spec[leaf].shape
        if height < size[0] or width < size[1]:
            raise ArgumentError(
                f"size={size!r} is larger than the images, {height}×{width}; give fraction= to resize them"
            )
    return _CenterCrop(inner, leaf=leaf, size=size, fraction=fraction)


def random_crop(source: Source, size: tuple[int, int], *, leaf: str = "image", padding: int = 0) -> Source:
    """Returns a source with a random part of each image, as it is; another part in every epoch.

    **Arguments:** `source`: samples are mappings; `leaf` is uint8 `[height, width, channels]`. `size`: `(height,
    width)` of the part, in pixels. `padding`: black pixels put around the image before.

    **Raises:** `ArgumentError` if `leaf` holds no such images, or the part is larger than image and padding;
    `MissingExtra`.

    **Source:** He et al., "Deep residual learning for image recognition" (CVPR 2016), section 4.2, with 4 pixels.
    """
    check_size(size)
    height, width, _ = image_spec(source, leaf, needed_by="random_crop").shape
    if padding < 0:
        raise ArgumentError(f"padding={padding}: expected 0 or more pixels")
    if size[0] > height + 2 * padding or size[1] > width + 2 * padding:
        raise ArgumentError(
            f"size={size!r} is larger than the images, {height}×{width}, with padding={padding} on each side; give a "
            "smaller size or more padding"
        )
    _warm(np.uint8)
    return _RandomCrop(source, place_of(source, "crop"), leaf=leaf, size=size, padding=padding)


def flipped(source: Source, *, probability: float = 0.5, leaf: str = "image") -> Source:
    """Returns a source whose images are mirrored at random, left to right; others in every epoch.

    **Arguments:** `source`: samples are mappings; `leaf` is `[height, width, channels]` of any dtype. `probability`:
    that an image is mirrored.

    **Raises:** `ArgumentError` if `leaf` holds no such images or `probability` is none; `MissingExtra`.
    """
    spec = leaf_spec(source, leaf, needed_by="flipped")
    if len(spec.shape) != 3:
        raise ArgumentError(
            f"flipped needs leaf={leaf!r} as [height, width, channels], got {spec.dtype}{list(spec.shape)}; images "
            "that are bytes need decoded() or random_resized_crop() first"
        )
    if not 0 <= probability <= 1:
        raise ArgumentError(f"probability={probability}: expected 0 to 1")
    _warm(spec.dtype)
    return _Flipped(source, place_of(source, "flip"), leaf=leaf, probability=probability)


def _ready(source: Source, leaf: str, size: tuple[int, int], needed_by: str) -> Source:
    """Returns what decodes crops of the images, if they are encoded, or the source itself if they are decoded."""
    leaf_spec(source, leaf, needed_by=needed_by)
    decoder = encoded(source, leaf)
    _warm(np.uint8)
    if decoder is not None:
        return decoder.cropping(size)
    image_spec(source, leaf, needed_by=needed_by)
    return source


def _warm(dtype: Any) -> None:
    """Compiles the kernels, or finds that numba is missing, before the first batch."""
    kernels = _kernels()
    blank = np.zeros((1, 2, 2, 3), dtype)
    kernels.mirror(blank, np.ones(1, np.bool_))
    if np.dtype(dtype) == np.uint8:
        kernels.cut(blank, np.zeros((1, 2), np.int64), blank.copy())
        kernels.resize_boxes(blank, np.array([[0, 0, 2, 2]]), np.zeros((1, 1, 1, 3), np.uint8))


def _kernels() -> Any:
    from braidax.data.transforms.images import kernels  # imports numba, which takes a while and may be missing

    return kernels


@dataclass(frozen=True, eq=False)
class _RandomResizedCrop(Drawing):
    leaf: str = field(kw_only=True)
    size: tuple[int, int] = field(kw_only=True)
    scale: tuple[float, float] = field(kw_only=True)
    ratio: tuple[float, float] = field(kw_only=True)
    scratch: Scratch = field(default_factory=Scratch, kw_only=True, compare=False, repr=False)

    @property
    def sample_spec(self) -> Any:
        return _with_size(self.source, self.leaf, self.size)

    def read(self, indices: Indices, out: Any) -> None:
        draws = Draws(indices, seed=self.seed, epoch=self.epoch, place=self.place)
        _read_boxes(self.source, self.leaf, indices, out, lambda sizes: self._boxes(draws, sizes), self.scratch)

    def _boxes(self, draws: Draws, sizes: Int64[np.ndarray, "n 2"]) -> NDArray[np.int64]:
        heights, widths = sizes[:, :1], sizes[:, 1:]
        areas = draws.uniform(*self.scale, (_ATTEMPTS,)) * (heights * widths)
        ratios = np.exp(draws.uniform(math.log(self.ratio[0]), math.log(self.ratio[1]), (_ATTEMPTS,)))
        places = draws.random((2,))
        tried = np.rint(np.stack([np.sqrt(areas / ratios), np.sqrt(areas * ratios)], axis=-1)).astype(np.int64)
        fits = ((tried > 0) & (tried <= sizes[:, None])).all(axis=-1)
        parts = np.take_along_axis(tried, fits.argmax(axis=1)[:, None, None], axis=1)[:, 0]
        failed = ~fits.any(axis=-1)
        bounded = np.clip(widths / heights, *self.ratio)  # the largest part, where no attempt fitted
        largest = np.concatenate([np.minimum(heights, widths / bounded), np.minimum(widths, heights * bounded)], axis=1)
        parts[failed] = np.clip(np.rint(largest[failed]).astype(np.int64), 1, sizes[failed])
        corners = (places * (sizes - parts + 1)).astype(np.int64)
        corners[failed] = (sizes[failed] - parts[failed]) // 2
        return np.concatenate([corners, parts], axis=1)

    @property
    def own_stamp(self) -> str | None:
        """Of what is done, and of what is drawn."""
        return stamp_of_fields(self)

    def describe(self) -> Mapping[str, str]:
        height, width = self.size
        return {**self.source.describe(), "crop": f"{self.leaf} to {height}×{width}, a random part, resized"}


@dataclass(frozen=True, eq=False)
class _CenterCrop(Wrapping):
    leaf: str = field(kw_only=True)
    size: tuple[int, int] = field(kw_only=True)
    fraction: float | None = field(kw_only=True)
    scratch: Scratch = field(default_factory=Scratch, kw_only=True, compare=False, repr=False)

    @property
    def sample_spec(self) -> Any:
        return _with_size(self.source, self.leaf, self.size)

    def read(self, indices: Indices, out: Any) -> None:
        _read_boxes(self.source, self.leaf, indices, out, lambda sizes: self._boxes(indices, sizes), self.scratch)

    def _boxes(self, indices: Indices, sizes: Int64[np.ndarray, "n 2"]) -> NDArray[np.int64]:
        parts = np.broadcast_to(np.array(self.size), sizes.shape)
        if self.fraction is not None:
            factors = (sizes / parts).min(axis=1, keepdims=True) * self.fraction
            parts = np.maximum(np.rint(factors * parts).astype(np.int64), 1)
        if (small := (parts > sizes).any(axis=1)).any():
            first = int(small.argmax())
            raise RecordError(
                f"leaf {self.leaf!r}, record {indices[first]}: the image is {sizes[first, 0]}×{sizes[first, 1]} "
                f"pixels, smaller than size={self.size!r}; give fraction= to resize images"
            )
        return np.concatenate([(sizes - parts) // 2, parts], axis=1)

    @property
    def own_stamp(self) -> str | None:
        """Of what is done, and of what is drawn."""
        return stamp_of_fields(self)

    def describe(self) -> Mapping[str, str]:
        how = "" if self.fraction is None else f", {self.fraction:g} of the image, resized"
        crop = f"{self.leaf} to {self.size[0]}×{self.size[1]}, the center{how}"
        return {**self.source.describe(), "crop": crop}


@dataclass(frozen=True, eq=False)
class _RandomCrop(Drawing):
    leaf: str = field(kw_only=True)
    size: tuple[int, int] = field(kw_only=True)
    padding: int = field(kw_only=True)
    scratch: Scratch = field(default_factory=Scratch, kw_only=True, compare=False, repr=False)

    @property
    def sample_spec(self) -> Any:
        return _with_size(self.source, self.leaf, self.size)

    def read(self, indices: Indices, out: Any) -> None:
        spec = self.source.sample_spec[self.leaf]
        images = self.scratch.take(spec, len(indices))
        self.source.read(indices, {**out, self.leaf: images})
        draws = Draws(indices, seed=self.seed, epoch=self.epoch, place=self.place)
        room = np.array(spec.shape[:2]) + 2 * self.padding - np.array(self.size) + 1
        with span("decode", "crop", num_bytes=out[self.leaf].nbytes):
            corners = (draws.random((2,)) * room).astype(np.int64) - self.padding
            _kernels().cut(images, corners, out[self.leaf])

    @property
    def own_stamp(self) -> str | None:
        """Of what is done, and of what is drawn."""
        return stamp_of_fields(self)

    def describe(self) -> Mapping[str, str]:
        crop = f"{self.leaf} to {self.size[0]}×{self.size[1]}, a random part, padding {self.padding}"
        return {**self.source.describe(), "crop": crop}


@dataclass(frozen=True, eq=False)
class _Flipped(Drawing):
    leaf: str = field(kw_only=True)
    probability: float = field(kw_only=True)

    @property
    def sample_spec(self) -> Any:
        return self.source.sample_spec

    def read(self, indices: Indices, out: Any) -> None:
        self.source.read(indices, out)
        draws = Draws(indices, seed=self.seed, epoch=self.epoch, place=self.place)
        with span("decode", "flip", num_bytes=out[self.leaf].nbytes):
            _kernels().mirror(out[self.leaf], draws.random() < self.probability)

    @property
    def own_stamp(self) -> str | None:
        """Of what is done, and of what is drawn."""
        return stamp_of_fields(self)

    def describe(self) -> Mapping[str, str]:
        return {**self.source.describe(), "flip": f"{self.leaf} with probability {self.probability:g}"}


def _with_size(source: Source, leaf: str, size: tuple[int, int]) -> Any:
    spec = cast("Mapping[str, Any]", source.sample_spec)
    return {**spec, leaf: jax.ShapeDtypeStruct((*size, spec[leaf].shape[2]), np.uint8)}


def _read_boxes(source: Source, leaf: str, indices: Indices, out: Any, choose: Any, scratch: Scratch) -> None:
    if isinstance(source, DecodedSource) and source.decoding.crops:
        source.read_crops(indices, out, choose)
        return
    spec = source.sample_spec[leaf]
    images = scratch.take(spec, len(indices))
    source.read(indices, {**out, leaf: images})
    with span("decode", "crop", num_bytes=out[leaf].nbytes):
        boxes = choose(np.tile(np.array(spec.shape[:2]), (len(indices), 1)))
        if (boxes[:, 2:] == np.array(out[leaf].shape[1:3])).all():
            _kernels().cut(images, boxes[:, :2].copy(), out[leaf])
        else:
            _kernels().resize_boxes(images, boxes, out[leaf])
