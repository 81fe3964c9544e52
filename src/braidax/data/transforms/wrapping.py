"""Sources that wrap others: what all of them hand on to the source inside."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.source import Source, source_at
from braidax.data.source import Wrapping as Wrapping
from braidax.data.source import WrappingIntegers as WrappingIntegers
from braidax.data.source import WrappingSlices as WrappingSlices
from braidax.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Drawing(Wrapping):
    """A source that draws random numbers for each of its samples."""

    place: str
    seed: int | None = 0
    epoch: int = 0

    def at(self, seed: int | None, epoch: int) -> Source:
        """Returns itself as it is in an epoch, around the source inside as that is then."""
        return replace(self, source=source_at(self.source, seed, epoch), seed=seed, epoch=epoch)


def stamp_of_fields(source: Wrapping) -> str:
    """Returns the kind of a source and all of its fields that are compared, but for the source inside."""
    names = [field.name for field in fields(source) if field.compare and field.name != "source"]
    return f"{type(source).__name__}{[(name, getattr(source, name)) for name in names]}"


def place_of(source: Source, kind: str) -> str:
    """Returns a name for a new source around another, that none inside has: its kind, and how many draw inside."""
    return f"{kind}/{_num_drawing(source)}"


def _num_drawing(source: Any) -> int:
    """Counts the sources that draw, along the path on which most of them do."""
    inside = [getattr(source, "source", None), *getattr(source, "sources", ())]
    return isinstance(source, Drawing) + max(_num_drawing(one) if isinstance(one, Source) else 0 for one in inside)


class Scratch(threading.local):
    """A buffer for each thread, so that windows between two stages need no new memory."""

    buffer = np.empty(0, np.uint8)

    def take(self, spec: jax.ShapeDtypeStruct, num_samples: int) -> NDArray[Any]:
        """Returns an array `[num_samples, *shape]` that is the caller's until this thread takes another."""
        shape = (num_samples, *spec.shape)
        num_bytes = int(np.prod(shape)) * np.dtype(spec.dtype).itemsize
        if self.buffer.nbytes < num_bytes:
            self.buffer = np.empty(num_bytes, np.uint8)
        return self.buffer[:num_bytes].view(spec.dtype).reshape(shape)

    def __reduce__(self) -> Any:
        return Scratch, ()


def leaf_spec(source: Source, leaf: str, *, needed_by: str) -> jax.ShapeDtypeStruct:
    """Returns the spec of one leaf of a source whose samples are mappings.

    **Raises:** `ArgumentError` if there is no such leaf.
    """
    spec = source.sample_spec
    fields = sorted(cast(Mapping[str, Any], spec)) if isinstance(spec, Mapping) else []
    if leaf not in fields:
        raise ArgumentError(f"{needed_by} needs the leaf={leaf!r}, but samples have {fields or spec}; pass leaf=")
    return cast(jax.ShapeDtypeStruct, spec[leaf])


def image_spec(source: Source, leaf: str, *, needed_by: str) -> jax.ShapeDtypeStruct:
    """Returns the spec of a leaf of images.

    **Raises:** `ArgumentError` unless it is uint8 `[height, width, channels]`.
    """
    image = leaf_spec(source, leaf, needed_by=needed_by)
    if image.dtype != np.uint8 or len(image.shape) != 3:
        raise ArgumentError(
            f"{needed_by} needs leaf={leaf!r} as uint8 [height, width, channels], got {image.dtype}{list(image.shape)}"
        )
    return image


def check_size(size: Any, name: str = "size") -> None:
    """Raises `ArgumentError` unless a size is two positive integers."""
    numbers = list(cast("Sequence[Any]", size)) if isinstance(size, tuple | list) else []
    if len(numbers) != 2 or not all(isinstance(number, int | np.integer) and number >= 1 for number in numbers):
        side = size if isinstance(size, int) and size >= 1 else 224
        raise ArgumentError(
            f"{name}={size!r}: expected (height, width), two positive integers, such as {name}=({side}, {side})"
        )
