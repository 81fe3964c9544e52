"""Sources made from sources: resized, normalized, or mapped by a user's function, on whole windows."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from braidax.data.resize import resize
from braidax.data.sources.source import Source, allocate, loader_dtype, narrow
from braidax.errors import ArgumentError, RecordError
from braidax.spans import span


def resized(source: Source, size: tuple[int, int], *, leaf: str = "image") -> Source:
    """Returns a source whose images have another size, by antialiased bilinear interpolation.

    **Arguments:** `source`: samples are mappings; `leaf` is uint8 `[height, width, channels]`. `size`: the new
    `(height, width)` in pixels.

    **Raises:** `ArgumentError` if `leaf` is not such an image or `size` is not two positive integers; `MissingExtra`.
    """
    spec = _image_spec(source, leaf, needed_by="resized")
    if len(size) != 2 or min(size) < 1:
        raise ArgumentError(f"size={size!r} is not a (height, width) of positive integers, such as size=(224, 224)")
    if spec.shape[:2] == tuple(size):
        return source
    blank = np.zeros((1, *spec.shape), np.uint8)
    resize(blank, np.zeros((1, *size, spec.shape[2]), np.uint8))  # compiled, or known to be missing, before any batch
    facts = {"resized": f"{leaf} to {size[0]} x {size[1]}, bilinear, antialiased"}
    return _Remade(source, leaf, jax.ShapeDtypeStruct((*size, spec.shape[2]), np.uint8), resize, facts)


def normalized(source: Source, mean: Sequence[float], std: Sequence[float], *, leaf: str = "image") -> Source:
    """Returns a source whose images are float32 `(image / 255 - mean) / std`.

    Done by the loader's threads this quadruples the bytes sent to the devices; where that matters, normalize inside
    the loss instead.

    **Arguments:** `source`: samples are mappings; `leaf` is uint8 `[height, width, channels]`. `mean`, `std`: one
    number a channel, in units of the image's full scale.

    **Raises:** `ArgumentError` if `leaf` is not such an image or the lengths differ from its channels.
    """
    spec = _image_spec(source, leaf, needed_by="normalized")
    for name, value in {"mean": mean, "std": std}.items():
        if len(value) != spec.shape[2]:
            raise ArgumentError(f"{name}={value!r} has {len(value)} numbers, but {leaf!r} has {spec.shape[2]} channels")
    if min(std) <= 0:
        raise ArgumentError(f"std={std!r} must be positive in every channel")
    scale = np.tile(1.0 / (255.0 * np.asarray(std)), spec.shape[1]).astype(np.float32)
    offset = np.tile(-np.asarray(mean) / np.asarray(std), spec.shape[1]).astype(np.float32)

    def normalize(original: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        rows = out.reshape(-1, scale.size)
        np.multiply(original.reshape(rows.shape), scale, out=rows)
        rows += offset

    facts = {"normalized": f"{leaf} to float32"}
    return _Remade(source, leaf, jax.ShapeDtypeStruct(spec.shape, np.float32), normalize, facts)


def mapped(source: Source, transform: Callable[[Any], Any]) -> Source:
    """Returns a source whose windows of samples went through a function.

    **Arguments:** `transform`: takes a PyTree of NumPy arrays `[n, *sample_shape]` (`n` varies from call to call) and
    returns another with the same `n`; the result for a sample must not depend on its neighbors in the window. Called
    from many threads at once. Its result on sample 0 sets the shapes and dtypes; NumPy's 64-bit defaults are loaded as
    32-bit ones, unless `jax_enable_x64` is set.

    **Raises:** `RecordError` when `transform` raises or returns another shape, naming the record.
    """
    if len(source) == 0:
        raise ArgumentError(
            "source has no samples, so the result of transform cannot be known; give a source that has some"
        )
    window = allocate(source.sample_spec, 1)
    source.read(np.zeros(1, np.int64), window)
    result = _apply(transform, window, np.zeros(1, np.int64))
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if np.ndim(leaf) < 1 or np.shape(leaf)[0] != 1:
            raise RecordError(
                f"transform={_name(transform)} returned shape {np.shape(leaf)} in leaf {_key(path)} for a window of 1 "
                f"sample; expected a leading dim of 1: transform takes and returns whole windows [n, ...]"
            )
    where = f"transform={_name(transform)}"
    spec = jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf_spec(np.asarray(leaf), where, _key(path)), result)
    return _Mapped(source, transform, spec)


class _Scratch(threading.local):
    """A buffer per thread, so that windows between two stages need no new memory."""

    buffer = np.empty(0, np.uint8)

    def take(self, spec: jax.ShapeDtypeStruct, num_samples: int) -> NDArray[Any]:
        shape = (num_samples, *spec.shape)
        num_bytes = int(np.prod(shape)) * np.dtype(spec.dtype).itemsize
        if self.buffer.nbytes < num_bytes:
            self.buffer = np.empty(num_bytes, np.uint8)
        return self.buffer[:num_bytes].view(spec.dtype).reshape(shape)


class _Remade(Source):
    """A source one of whose leaves is made from the original by `remake(original, out)`, on whole windows."""

    def __init__(
        self, source: Source, leaf: str, spec: jax.ShapeDtypeStruct, remake: Callable[[Any, Any], None], facts: Any
    ) -> None:
        self._source = source
        self._leaf = leaf
        self._spec = spec
        self._remake = remake
        self._facts: Mapping[str, str] = facts
        self._scratch = _Scratch()

    @property
    def sample_spec(self) -> Any:
        return {**self._source.sample_spec, self._leaf: self._spec}

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Int64[np.ndarray, " n"], out: Any) -> None:
        original = self._scratch.take(self._source.sample_spec[self._leaf], len(indices))
        self._source.read(indices, {**out, self._leaf: original})
        with span("decode", next(iter(self._facts)), num_bytes=out[self._leaf].nbytes):
            self._remake(original, out[self._leaf])

    def describe(self) -> Mapping[str, str]:
        return {**self._source.describe(), **self._facts}


@dataclass(frozen=True)
class _Mapped(Source):
    source: Source
    transform: Callable[[Any], Any]
    spec: Any

    @property
    def sample_spec(self) -> Any:
        return self.spec

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: Int64[np.ndarray, " n"], out: Any) -> None:
        window = allocate(self.source.sample_spec, len(indices))
        self.source.read(indices, window)
        with span("decode", _name(self.transform)):
            result = _apply(self.transform, window, indices)
            got, expected = jax.tree.structure(result), jax.tree.structure(out)
            if got != expected:
                raise RecordError(
                    f"transform={_name(self.transform)} returned the structure {got} for records "
                    f"{_range(indices)}, but {expected} for record 0; return the same structure for every window"
                )
            for (path, target), leaf in zip(
                jax.tree_util.tree_leaves_with_path(out), jax.tree.leaves(result), strict=True
            ):
                self._store(leaf, target, path, indices)

    def _store(self, leaf: Any, target: Any, path: Any, indices: Any) -> None:
        value, where = np.asarray(leaf), f"transform={_name(self.transform)}"
        if value.shape != target.shape or loader_dtype(value.dtype, where=where, leaf=_key(path)) != target.dtype:
            raise RecordError(
                f"transform={_name(self.transform)} returned {value.dtype}{list(value.shape)} in leaf {_key(path)} for "
                f"records {_range(indices)}; expected {target.dtype}{list(target.shape)}, as record 0 gave"
            )
        narrow(value, target, indices, where=where, leaf=_key(path))

    def describe(self) -> Mapping[str, str]:
        return {**self.source.describe(), "transform": _name(self.transform)}


def _apply(transform: Callable[[Any], Any], window: Any, indices: Any) -> Any:
    try:
        return transform(window)
    except Exception as error:
        record = _first_failing(transform, window, indices)
        raise RecordError(
            f"transform={_name(transform)} raised {type(error).__name__}: {error}, on {record}; "
            f"mend the transform or the record"
        ) from error


def _first_failing(transform: Callable[[Any], Any], window: Any, indices: Any) -> str:
    """Names the record that fails alone, or the window when each of its records passes alone."""
    for i, index in enumerate(indices):
        try:
            transform(jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], window))
        except Exception:  # noqa: BLE001 (the caller raises the first error)
            return f"record {index}"
    return f"records {_range(indices)} taken together"


def _leaf_spec(leaf: NDArray[Any], where: str, path: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[1:], loader_dtype(leaf.dtype, where=where, leaf=path))


def _image_spec(source: Source, leaf: str, *, needed_by: str) -> jax.ShapeDtypeStruct:
    spec = source.sample_spec
    fields = sorted(cast(Mapping[str, Any], spec)) if isinstance(spec, Mapping) else []
    if leaf not in fields:
        raise ArgumentError(f"{needed_by} needs the leaf={leaf!r}, but samples have {fields or spec}; pass leaf=")
    image = cast(jax.ShapeDtypeStruct, spec[leaf])
    if image.dtype != np.uint8 or len(image.shape) != 3:
        raise ArgumentError(
            f"{needed_by} needs leaf={leaf!r} as uint8 [height, width, channels], got {image.dtype}{list(image.shape)}"
        )
    return image


def _range(indices: Any) -> str:
    listed = [int(index) for index in indices[:4]]
    return f"{listed}" if len(indices) <= 4 else f"{listed[:-1]}… ({len(indices)} of them)"


def _key(path: Any) -> str:
    return jax.tree_util.keystr(path) or "(the only one)"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
