"""Sources whose images were bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.source import Box, ChosenRows, Indices, Sliced, Source, allocate, chosen_rows, is_varying, widened
from braidax.data.transforms.images.decode import (
    MAX_PIXELS,
    Choose,
    Decode,
    check_decode,
    compile_kernels,
    decode_images,
    image_size,
)
from braidax.data.transforms.wrapping import Wrapping, WrappingIntegers, WrappingSlices, check_size, leaf_spec
from braidax.errors import ArgumentError

Name = Callable[[int], str]
"""Names a record for errors."""


def decoded(
    source: Source,
    *,
    leaf: str = "image",
    size: tuple[int, int] | None = None,
    decode: Decode = "fast",
    max_pixels: int = MAX_PIXELS,
) -> Source:
    """Returns a source whose encoded images are pixels: uint8 `[height, width, 3]`, RGB, upright.

    **Arguments:** `source`: samples are mappings; `leaf` holds bytes of varying size: JPEG, PNG, WebP or BMP. `size`:
    `(height, width)` in pixels to resize to, antialiased; None when all images have the size of the first. `decode`:
    `"fast"` decodes JPEG images at the smallest scale that is not below the target and interpolates there; `"exact"`
    decodes in full, then resizes as Pillow does. They differ by one to three steps of 255 on average, by detail.
    `max_pixels`: an image that promises more is an error, before memory is taken for it.

    **Raises:** `ArgumentError` if `leaf` is not of varying size, or `size` or `decode` is wrong; `RecordError` when an
    image cannot be decoded, naming its record; `MissingExtra`.
    """
    if not is_varying(leaf_spec(source, leaf, needed_by="decoded")):
        spec = source.sample_spec[leaf]
        raise ArgumentError(
            f"decoded needs leaf={leaf!r} as bytes of varying size, got {spec.dtype}{list(spec.shape)}; images "
            "that are decoded already need no more than resized()"
        )
    if size is None and not len(source):
        raise ArgumentError("source has no samples, so the size of its images cannot be known; give size=")
    if max_pixels < 1:
        raise ArgumentError(f"max_pixels={max_pixels!r}: expected a positive number of pixels")
    return decode_leaf(source, leaf, size, decode, lambda record: f"leaf {leaf!r}, record {record}", max_pixels)


def decode_leaf(
    source: Source,
    leaf: str,
    size: tuple[int, int] | None,
    decode: Decode,
    name: Name,
    max_pixels: int = MAX_PIXELS,
) -> "DecodedSource":
    """Returns `decoded(source)`, whose errors call a record by `name(record)`."""
    check_decode(decode)
    compile_kernels()
    if size is None:
        seen = widened(source)
        window = allocate(seen.sample_spec, 1)
        seen.read(np.zeros(1, np.int64), window)
        first = image_size(window[leaf][0], name(0), max_pixels=max_pixels)
    else:
        check_size(size)
        first = size
    kind = DecodedSlices if isinstance(source, Sliced) and type(source.sample_spec) is dict else DecodedSource
    return kind(
        source, leaf, (first[0], first[1]), Decoding(decode, name, resizes=size is not None, max_pixels=max_pixels)
    )


@dataclass(frozen=True)
class Decoding:
    """How images are decoded.

    **Fields:** `decode`: fast or exact. `name`: names a record for errors. `resizes`: whether all sizes are taken.
    `crops`: whether a part of each image is asked for. `max_pixels`: of an image.
    """

    decode: Decode
    name: Name = field(repr=False)
    resizes: bool
    crops: bool = False
    max_pixels: int = MAX_PIXELS


@dataclass(frozen=True, eq=False)
class DecodedSource(Wrapping, WrappingIntegers):
    """A source whose leaf of encoded images is decoded."""

    leaf: str
    size: tuple[int, int]
    decoding: Decoding

    @property
    def sample_spec(self) -> Any:
        return {**self.source.sample_spec, self.leaf: jax.ShapeDtypeStruct((*self.size, 3), np.uint8)}

    def read(self, indices: Indices, out: Any) -> None:
        self.read_crops(indices, out, None)

    def read_crops(self, indices: Indices, out: Any, choose: Choose | None) -> None:
        """Reads samples, and of each image the crop that `choose` chooses."""
        payloads = np.empty(len(indices), object)
        self.source.read(indices, {**out, self.leaf: payloads})
        self._decode(indices, payloads, out[self.leaf], choose)

    def _decode(
        self, indices: Indices, payloads: NDArray[Any], images: NDArray[np.uint8], choose: Choose | None
    ) -> None:
        """Decodes the bytes of some samples' images, an object array `[n]`, into place."""
        decode_images(
            payloads.tolist(),
            images,
            where=lambda place: self.decoding.name(int(indices[place])),
            choose=choose,
            decode=self.decoding.decode,
            resizes=self.decoding.resizes or choose is not None,
            max_pixels=self.decoding.max_pixels,
        )

    @property
    def own_stamp(self) -> str | None:
        """Of the decoder."""
        return f"decoded {self.leaf} {self.size} {self.decoding.decode} {self.decoding.resizes} {self.decoding.crops}"

    def describe(self) -> Mapping[str, str]:
        exact = ", exact" if self.decoding.decode == "exact" else ""
        how = f" (resized{exact})" if self.decoding.resizes else " (of the first image)"
        return {**self.source.describe(), "image size": f"{self.size[0]}×{self.size[1]}{how}"}

    def cropping(self, size: tuple[int, int]) -> "DecodedSource":
        """Returns itself with crops of another size, of which `read_crops` is told where they are."""
        return replace(self, size=size, decoding=replace(self.decoding, resizes=True, crops=True))

    def of_rows(self, rows: ChosenRows) -> "DecodedSource":
        """Returns what decodes some of the samples; errors call them as before. **Arguments:** `rows`: of itself."""

        def name(record: int) -> str:
            return self.decoding.name(int(rows.inside(np.array([record]))[0]))

        inside = chosen_rows(self.source, rows.places, rows.permutation)
        return replace(self, source=inside, decoding=replace(self.decoding, name=name))


@dataclass(frozen=True, eq=False)
class DecodedSlices(DecodedSource, WrappingSlices):
    """The same around a source that can leave out leaves: an image that is not wanted is neither read nor decoded."""

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        """Reads leaves, and decodes the images if they are wanted."""
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.sample_spec)]
        place = paths.index((jax.tree_util.DictKey(self.leaf),))
        images, inner_boxes, inner = out[place], list(boxes), list(out)
        if images is not None:
            inner_boxes[place], inner[place] = (), np.empty(len(indices), object)
        cast(Sliced, self.source).read_slices(indices, inner_boxes, inner)
        if images is not None:
            self._decode(indices, cast("NDArray[Any]", inner[place]), images, None)


def encoded(source: Source, leaf: str) -> DecodedSource | None:
    """Returns what decodes a leaf so that crops of it can be read, or None if the source has no encoded images there.

    Images that a source was asked to resize are as it was asked: crops are cut from the resized ones. Of a part of a
    source, such as `split` makes, the images are encoded where those of the whole are.
    """
    if isinstance(source, ChosenRows):
        whole = encoded(source.source, leaf)
        return None if whole is None else whole.of_rows(source)
    if isinstance(source, DecodedSource):
        return source if source.leaf == leaf and not source.decoding.resizes else None
    inside = getattr(source, "decodes", None)
    if isinstance(inside, DecodedSource):
        return encoded(inside, leaf)
    spec = source.sample_spec
    if isinstance(spec, Mapping) and leaf in spec and is_varying(spec[leaf]):
        return decode_leaf(source, leaf, (1, 1), "fast", lambda record: f"leaf {leaf!r}, record {record}")
    return None
