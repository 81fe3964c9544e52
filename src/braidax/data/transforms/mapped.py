"""Sources made from sources: resized, normalized, or mapped by a user's function, on whole windows."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from braidax.data.leaves import uncut
from braidax.data.sampling.draws import Draws
from braidax.data.source import VARYING, Source, allocate, is_varying, loader_dtype, narrow, widened
from braidax.data.transforms.wrapping import (
    Drawing,
    Scratch,
    Wrapping,
    WrappingIntegers,
    check_size,
    image_spec,
    place_of,
)
from braidax.errors import ArgumentError, RecordError
from braidax.spans import span


def resized(source: Source, size: tuple[int, int], *, leaf: str = "image") -> Source:
    """Returns a source whose images have another size, by antialiased bilinear interpolation.

    **Arguments:** `source`: samples are mappings; `leaf` is uint8 `[height, width, channels]`. `size`: the new
    `(height, width)` in pixels.

    **Raises:** `ArgumentError` if `leaf` is not such an image or `size` is not two positive integers; `MissingExtra`.
    """
    spec = image_spec(source, leaf, needed_by="resized")
    check_size(size)
    if spec.shape[:2] == tuple(size):
        return source
    from braidax.data.transforms.images.kernels import resize  # imports numba, which takes a while and may be missing

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
    spec = image_spec(source, leaf, needed_by="normalized")
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


def mapped(source: Source, transform: Callable[..., Any]) -> Source:
    """Returns a source whose windows of samples went through a function.

    **Arguments:** `transform`: takes a PyTree of NumPy arrays `[n, *sample_shape]` (`n` varies from call to call) and
    returns another with the same `n`; the result for a sample must not depend on its neighbors in the window. Called
    from many threads at once. Its result on sample 0 sets the shapes and dtypes; NumPy's 64-bit defaults are loaded as
    32-bit ones, unless `jax_enable_x64` is set. An object array `[n]` is a leaf whose size varies. Integers of 64 bits
    in arrays, tables and records come as they are stored, so that hashed ids can be taken modulo a number here, by
    NumPy: functions of JAX would cut them, and are refused in windows that hold such.

    With a parameter named `rng` it gets random numbers too: `rng.random(shape)`, `rng.uniform(low, high, shape)`,
    `rng.integers(low, high, shape)` and `rng.normal(shape)` return arrays `[n, *shape]` whose rows depend on seed,
    epoch and sample alone (see `braidax.data.Draws`).

    **Raises:** `RecordError` when `transform` raises or returns another shape, naming the record.
    """
    if len(source) == 0:
        raise ArgumentError(
            "source has no samples, so the result of transform cannot be known; give a source that has some"
        )
    source = widened(source)
    indices, window = np.zeros(1, np.int64), allocate(source.sample_spec, 1)
    source.read(indices, window)
    place = place_of(source, "map")
    rng = Draws(indices, seed=0, epoch=0, place=place) if _draws(transform) else None
    result = _apply(transform, window, indices, rng)
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        if np.ndim(leaf) < 1 or np.shape(leaf)[0] != 1:
            raise RecordError(
                f"transform={_name(transform)} returned shape {np.shape(leaf)} in leaf {_key(path)} for a window of 1 "
                f"sample; expected a leading dim of 1: transform takes and returns whole windows [n, ...]"
            )
    where = f"transform={_name(transform)}"
    spec = jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf_spec(np.asarray(leaf), where, _key(path)), result)
    if rng is None:
        return _Mapped(source, transform, spec)
    return _MappedAtRandom(source, place, transform=transform, spec=spec)


@dataclass(frozen=True, eq=False)
class _Remade(Wrapping, WrappingIntegers):
    """A source one of whose leaves is made from the original by `remake(original, out)`, on whole windows."""

    leaf: str
    spec: jax.ShapeDtypeStruct
    remake: Callable[[Any, Any], None]
    facts: Mapping[str, str]
    scratch: Scratch = field(default_factory=Scratch, compare=False, repr=False)

    @property
    def sample_spec(self) -> Any:
        return {**self.source.sample_spec, self.leaf: self.spec}

    def read(self, indices: Int64[np.ndarray, " n"], out: Any) -> None:
        original = self.scratch.take(self.source.sample_spec[self.leaf], len(indices))
        self.source.read(indices, {**out, self.leaf: original})
        with span("decode", next(iter(self.facts)), num_bytes=out[self.leaf].nbytes):
            self.remake(original, out[self.leaf])

    def describe(self) -> Mapping[str, str]:
        return {**self.source.describe(), **self.facts}


class _Anew:
    """Samples that a function has made: what their numbers mean, it alone knows."""

    @property
    def class_names(self) -> Mapping[str, Sequence[str]]:
        return {}


@dataclass(frozen=True, eq=False)
class _Mapped(Wrapping, _Anew):
    transform: Callable[..., Any]
    spec: Any

    @property
    def sample_spec(self) -> Any:
        return self.spec

    def read(self, indices: Int64[np.ndarray, " n"], out: Any) -> None:
        _read_mapped(self.source, self.transform, None, indices, out)

    def describe(self) -> Mapping[str, str]:
        return {**self.source.describe(), "transform": _name(self.transform)}


@dataclass(frozen=True, eq=False)
class _MappedAtRandom(Drawing, _Anew):
    transform: Callable[..., Any] = field(kw_only=True)
    spec: Any = field(kw_only=True)

    @property
    def sample_spec(self) -> Any:
        return self.spec

    def read(self, indices: Int64[np.ndarray, " n"], out: Any) -> None:
        rng = Draws(indices, seed=self.seed, epoch=self.epoch, place=self.place)
        _read_mapped(self.source, self.transform, rng, indices, out)

    def describe(self) -> Mapping[str, str]:
        return {**self.source.describe(), "transform": f"{_name(self.transform)}, at random"}


def _read_mapped(source: Source, transform: Callable[..., Any], rng: Draws | None, indices: Any, out: Any) -> None:
    window = allocate(source.sample_spec, len(indices))
    source.read(indices, window)
    with span("decode", _name(transform)):
        result = _apply(transform, window, indices, rng)
        got, expected = jax.tree.structure(result), jax.tree.structure(out)
        if got != expected:
            raise RecordError(
                f"transform={_name(transform)} returned the structure {got} for records {_range(indices)}, but "
                f"{expected} for record 0; return the same structure for every window"
            )
        for (path, target), leaf in zip(jax.tree_util.tree_leaves_with_path(out), jax.tree.leaves(result), strict=True):
            _store(transform, leaf, target, path, indices)


def _store(transform: Callable[..., Any], leaf: Any, target: Any, path: Any, indices: Any) -> None:
    value, where = np.asarray(leaf), f"transform={_name(transform)}"
    varies = is_varying(value) and is_varying(target)
    fits = varies or loader_dtype(value.dtype, where=where, leaf=_key(path)) == target.dtype
    if value.shape != target.shape or not fits:
        raise RecordError(
            f"transform={_name(transform)} returned {value.dtype}{list(value.shape)} in leaf {_key(path)} for "
            f"records {_range(indices)}; expected {target.dtype}{list(target.shape)}, as record 0 gave"
        )
    if varies:
        target[...] = value
    else:
        narrow(value, target, indices, where=where, leaf=_key(path))


def _draws(transform: Callable[..., Any]) -> bool:
    try:
        return "rng" in inspect.signature(transform).parameters
    except (TypeError, ValueError):  # functions of C have no signature
        return False


def _call(transform: Callable[..., Any], window: Any, rng: Draws | None) -> Any:
    return uncut(lambda: transform(window) if rng is None else transform(window, rng=rng), window)


def _apply(transform: Callable[..., Any], window: Any, indices: Any, rng: Draws | None) -> Any:
    try:
        return _call(transform, window, rng)
    except Exception as error:
        record = _first_failing(transform, window, indices, rng)
        raise RecordError(
            f"transform={_name(transform)} raised {type(error).__name__}: {error}, on {record}; "
            f"mend the transform or the record"
        ) from error


def _first_failing(transform: Callable[..., Any], window: Any, indices: Any, rng: Draws | None) -> str:
    """Names the record that fails alone, or the window when each of its records passes alone."""
    for i, index in enumerate(indices):
        try:
            alone = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], window)
            _call(transform, alone, None if rng is None else rng.alone(i))
        except Exception:  # noqa: BLE001 (the caller raises the first error)
            return f"record {index}"
    return f"records {_range(indices)} taken together"


def _leaf_spec(leaf: NDArray[Any], where: str, path: str) -> jax.ShapeDtypeStruct:
    if is_varying(leaf) and leaf.ndim == 1:
        return VARYING
    return jax.ShapeDtypeStruct(leaf.shape[1:], loader_dtype(leaf.dtype, where=where, leaf=path))


def _range(indices: Any) -> str:
    listed = [int(index) for index in indices[:4]]
    return f"{listed}" if len(indices) <= 4 else f"{listed[:-1]}… ({len(indices)} of them)"


def _key(path: Any) -> str:
    return jax.tree_util.keystr(path) or "(the only one)"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
