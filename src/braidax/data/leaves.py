"""What samples share: which dtype a leaf gets, how rows of an array are copied into place under it, what is cut out."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError, FormatError, RecordError

Indices = NDArray[np.int64]

_NARROWED_BYTES = 1 << 18  # as stored, of the values that are narrowed at once

Which = slice | Sequence[int] | NDArray[Any]
"""Which samples of a source: a slice, their indices, or a mask with a bool for each."""

VARYING: jax.ShapeDtypeStruct = jax.ShapeDtypeStruct((), np.dtype(object))
"""The spec of a leaf whose size differs from sample to sample: text, bytes, a list of any length.

In a window it is an object array `[n]` of `str`, `bytes` or NumPy arrays. Before a loader can load it, a transform has
to make arrays of one shape of it: `tokenized`, `padded`, `packed`, `mapped`.
"""


Integers = Literal["loaded", "stored"]
"""Whether integers of 64 bits are given as they are loaded, mostly in 32 bits, or as they are stored."""


@runtime_checkable
class Widened(Protocol):
    """A source, or what decodes its records, that has integers of 64 bits."""

    def widened(self) -> Any:
        """Returns the same samples with these integers as they are stored, for functions that run before a device."""
        ...


def is_at_hand(source: Any) -> bool:
    """Says whether the samples of a source are copied from memory, or from files mapped there, without waiting.

    A source that may have them so says it by its `is_at_hand`: then a loader reads several batches at once.
    """
    return _may_be_at_hand(type(source)) and source.is_at_hand


@functools.cache
def _may_be_at_hand(kind: type[Any]) -> bool:
    """Says whether a class of sources may have samples at hand; asked for every batch, and slow to find out."""
    return hasattr(kind, "is_at_hand")


def widened(source: Any) -> Any:
    """Returns a source with its integers of 64 bits as they are stored, where it can give them so; else itself."""
    return source.widened() if isinstance(source, Widened) else source


class WrappingIntegers:
    """What a source hands on whose source inside may have integers of 64 bits."""

    def widened(self) -> Any:
        """Returns itself around the source inside with these integers as they are stored."""
        inside: Any = self
        return replace(inside, source=widened(inside.source))


Kind = Literal["text", "bytes", "numbers"]
"""What the values of a leaf of varying size are made of: text of UTF-8, bytes, or numbers."""


class Flat(NamedTuple):
    """How a source holds the values of a leaf of varying size: those of a sample lie in one piece.

    **Fields:** `kind`. `stored`: the dtype of an item, bytes for all but numbers. `shape`: of an item.
    """

    kind: Kind
    stored: np.dtype[Any]
    shape: tuple[int, ...] = ()

    @property
    def item_bytes(self) -> int:
        """Bytes of one item."""
        return self.stored.itemsize * math.prod(self.shape)


@runtime_checkable
class Flattened(Protocol):
    """A source, or what decodes its records, that can fill rows with the values of a leaf of varying size."""

    def flat_values(self, leaf: str) -> Flat | None:
        """Returns how it holds the values of a leaf: then it takes `Rows` in place of the leaf's array, else None."""
        ...


class WrappingFlat:
    """What a source hands on that reads each leaf as the source inside does."""

    source: Any

    def flat_values(self, leaf: str) -> Flat | None:
        """Returns how the source inside holds the values of a leaf."""
        return flat_of(self.source, leaf)


def flat_of(source: Any, leaf: str) -> Flat | None:
    """Returns how a source holds the values of a leaf; None where it cannot fill rows with them."""
    return source.flat_values(leaf) if isinstance(source, Flattened) else None


def uncut(function: Callable[[], Any], window: Any) -> Any:
    """Calls a function of samples; where these hold integers that 32 bits do not, functions of JAX in it are refused.

    They would cut such integers in silence, as they do with all that comes from the host.

    **Arguments:** `window`: what the function was given, arrays or NumPy scalars. **Raises:** `ValueError`.
    """
    told = too_wide(window)
    if not told:
        return function()
    try:
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            made = function()
    except jax.errors.JaxRuntimeError as error:
        if "Disallowed host-to-device transfer" not in str(error):
            raise
        raise ValueError(told) from error
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(made)):  # a constant of a compiled function
        raise ValueError(told)
    return made


def too_wide(window: Any) -> str:
    """Returns which leaf holds integers that do not fit in what JAX makes of them; nothing where all fit."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(window):
        held = _joined(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O" else leaf
        if not isinstance(held, np.ndarray | np.generic) or held.dtype.kind not in "iu" or not held.size:
            continue  # text, among others
        loaded = np.dtype(jax.dtypes.canonicalize_dtype(held.dtype))
        if loaded != held.dtype and not _fits(np.asarray(held), loaded):
            return (
                f"leaf {jax.tree_util.keystr(path)} holds {held.dtype} that does not fit in {loaded}, to which "
                "functions of JAX cut it; use NumPy alone here, and take it modulo a number, or keep 64 bits with "
                "jax.config.update('jax_enable_x64', True)"
            )
    return ""


def _joined(values: NDArray[Any]) -> NDArray[Any]:
    """Returns the integers of 64 bits of an object array of arrays, one behind the other; nothing of other values."""
    if len(values) and isinstance(values[0], str | bytes):  # then all are
        return np.empty(0, np.bool_)
    arrays = [value for value in values.tolist() if isinstance(value, np.ndarray)]
    if not arrays or arrays[0].dtype.kind not in "iu" or arrays[0].dtype.itemsize < 8:
        return np.empty(0, np.bool_)
    return np.concatenate([array.ravel() for array in arrays])


def is_varying(spec: Any) -> bool:
    """Says whether a leaf's spec is that of a leaf of varying size."""
    return np.dtype(spec.dtype) == np.dtype(object)


def batch_spec(sample_spec: Any, batch_size: int) -> Any:
    """Returns a PyTree of `jax.ShapeDtypeStruct` with the dim `batch_size` put before each leaf's shape."""

    def batched(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, *leaf.shape), leaf.dtype)

    return jax.tree.map(batched, sample_spec)


def allocate(sample_spec: Any, num_samples: int) -> Any:
    """Returns a PyTree of uninitialized NumPy arrays `[num_samples, *sample_shape]`, as `Source.read` fills them."""

    def empty(leaf: Any) -> NDArray[Any]:
        return np.empty((num_samples, *leaf.shape), leaf.dtype)

    return jax.tree.map(empty, sample_spec)


def loader_dtype(dtype: np.dtype[Any], *, where: str, leaf: str) -> np.dtype[Any]:
    """Returns the dtype in which a leaf is loaded: the stored one in native byte order, 64-bit numbers as 32-bit ones.

    JAX computes in 32 bits and would cut 64-bit arrays down in silence; here a value that does not fit is a
    `RecordError` (see `narrow`). With `jax_enable_x64` the 64-bit dtypes are kept.

    **Arguments:** `dtype`: as stored. `where`: the file or object. `leaf`: the leaf's name.

    **Raises:** `FormatError` for text, objects, dates, records and numbers wider than 64 bits.
    """
    numeric = dtype.kind in "biufc" or (dtype.kind == "V" and jnp.issubdtype(dtype, np.number))
    if not numeric or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise FormatError(
            f"{where}: leaf {leaf!r} has dtype {dtype}, which is no JAX dtype; expected bool, integers, floats or "
            "complex numbers of at most 64 bits a part: store it as one of them, or leave it out"
        )
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")))


def check_indices(indices: Indices, num_samples: int, *, where: str) -> None:
    """Raises `RecordError` when an index is not in `[0, num_samples)`."""
    if indices.size and (indices.min() < 0 or indices.max() >= num_samples):
        wrong = indices[(indices < 0) | (indices >= num_samples)][0]
        raise RecordError(
            f"{where}: there is no record {wrong}; it holds {num_samples} samples: use indices 0 to {num_samples - 1}"
        )


def gather(
    array: NDArray[Any], indices: Indices, out: NDArray[Any], *, where: str, leaf: str, first_record: int = 0
) -> None:
    """Copies `array[indices]` into `out`, without holding the GIL where the stored dtype is the loaded one.

    **Arguments:** `array`: `[num_samples, *sample_shape]`. `indices`: int64 `[n]`, already checked. `out`: C-contiguous
    `[n, *sample_shape]` of the `loader_dtype`. `where`, `leaf`, `first_record`: for errors; the last is the number of
    the record in `array[0]`.

    **Raises:** `RecordError` as `narrow`.
    """
    from braidax.data.storage.taken import take_rows

    if not array.flags.c_contiguous:
        narrow(array[indices], out, indices + first_record, where=where, leaf=leaf)
    elif array.dtype != out.dtype:
        step = max(1, min(len(indices), _NARROWED_BYTES * len(out) // max(1, out.size * array.itemsize)))
        values = np.empty((step, *array.shape[1:]), array.dtype)  # a stretch that stays in the core's cache
        for start in range(0, len(indices), step):
            rows, part = indices[start : start + step], out[start : start + step]
            stored = values[: len(rows)]
            take_rows(array, rows, stored)
            narrow(stored, part, rows + first_record, where=where, leaf=leaf)
    else:
        take_rows(array, indices, out)


def narrow(values: NDArray[Any], out: NDArray[Any], indices: Indices, *, where: str, leaf: str) -> None:
    """Copies stored values into `out`, whose dtype `loader_dtype` gave, and checks that every one fits.

    **Arguments:** `values`: `[n, *sample_shape]`. `out`: of the same shape. `indices`: int64 `[n]`, the records that
    the rows belong to. `where`, `leaf`: names for errors.

    **Raises:** `RecordError` naming the first record with a value beyond the range of `out`'s dtype.
    """
    if values.size and values.dtype.itemsize > out.dtype.itemsize and not _fits(values, out.dtype):
        info = np.iinfo(out.dtype) if values.dtype.kind in "iu" else np.finfo(out.dtype)
        parts = np.stack([np.real(values), np.imag(values)]) if values.dtype.kind == "c" else values[None]
        misfit: NDArray[np.bool_] = np.any(np.isfinite(parts) & ((parts < info.min) | (parts > info.max)), axis=0)
        if misfit.any():
            row = int(np.argwhere(misfit)[0][0])
            value = values[row][misfit[row]].flat[0]
            raise RecordError(
                f"{where}, record {indices[row]}: leaf {leaf!r} holds {value} ({values.dtype}), which does not fit in "
                f"{out.dtype}; store smaller values, {smaller(values.dtype)}or keep 64 bits with "
                "jax.config.update('jax_enable_x64', True)"
            )
    np.copyto(out, values, casting="same_kind")


def _fits(values: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Says whether the extremes of integers or floats fit; where it says no, a closer look may find that they do."""
    if values.dtype.kind in "iu":
        info = np.iinfo(dtype)
        return bool(values.min() >= info.min and values.max() <= info.max)
    if values.dtype.kind == "f":
        limits = np.finfo(dtype)
        return bool(np.fmin.reduce(values, axis=None) >= limits.min and np.fmax.reduce(values, axis=None) <= limits.max)
    return False


def smaller(dtype: np.dtype[Any]) -> str:
    """Returns what an error says of integers that do not fit; nothing of other numbers."""
    return "take them modulo a number in transform=, " if dtype.kind in "iu" else ""


def listed(names: Sequence[str], *, limit: int = 8) -> str:
    """Returns names as people read them: their number and the first few, or `"nothing"`."""
    return f"{len(names)}: {', '.join(names[:limit])}{' …' if len(names) > limit else ''}" if names else "nothing"


def samples_of(window: Any, num_samples: int) -> list[Any]:
    """Returns the samples of a window one by one."""
    leaves, structure = jax.tree.flatten(window)
    return [jax.tree.unflatten(structure, [leaf[row] for leaf in leaves]) for row in range(num_samples)]


def told_leaves(sample_spec: Any) -> dict[str, str]:
    """Returns dtype and shape of each leaf in words, by its path."""
    paths: Any = jax.tree_util.tree_leaves_with_path(sample_spec)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"
        for path, leaf in paths
    }


def cut_places(places: range | NDArray[np.int64], which: Which) -> range | NDArray[np.int64]:
    """Returns some of the places of samples. **Arguments**, **Raises:** as of `Source.__getitem__`."""
    if isinstance(which, slice):
        return places[which]
    wanted = np.asarray(which)
    if wanted.dtype == np.bool_ and wanted.shape == (len(places),):
        wanted = np.flatnonzero(wanted)
    if not wanted.size:
        wanted = wanted.astype(np.int64)
    if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        raise ArgumentError(
            f"index is an array of {wanted.dtype}{list(wanted.shape)}; expected a number, a slice, integers [n], or a "
            f"mask of bools [{len(places)}], as many as there are samples"
        )
    wrong = wanted[(wanted < -len(places)) | (wanted >= len(places))]
    if wrong.size:
        raise IndexError(
            f"there is no sample {wrong[0]}: the source has {len(places):,}, from 0 or, backward, from -1 on"
        )
    wanted = np.where(wanted < 0, wanted + len(places), wanted).astype(np.int64)
    return wanted * places.step + places.start if isinstance(places, range) else places[wanted]
