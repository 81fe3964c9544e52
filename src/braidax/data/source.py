"""The contract of a source: a number of samples that can be read in any order from any thread.

The functions below it are what the sources share: which dtype a leaf gets, and how rows of an array are copied into
place under that rule.
"""

import contextlib
import functools
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from braidax.errors import BraidaxError, FormatError, ReadError, RecordError

Indices = NDArray[np.int64]

_NARROWED_BYTES = 1 << 18  # as stored, of the values that are narrowed at once


@runtime_checkable
class Source(Protocol):
    """Samples on disk or in memory, readable at random.

    Anything with these members is a source; our own classes say so by inheriting. A path becomes one through
    `braidax.open`, and so does any object with `__len__` and `__getitem__`.
    """

    @property
    def sample_spec(self) -> Any:
        """A PyTree of `jax.ShapeDtypeStruct`: the shape and dtype of every leaf of **one** sample (no batch dim)."""
        ...

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def read(self, indices: Int64[np.ndarray, "n"], out: Any) -> None:
        """Reads samples into place.

        **Arguments:** `indices`: int64 `[n]`, in any order, repeats allowed. `out`: a PyTree like `sample_spec` of
        C-contiguous NumPy arrays `[n, *sample_shape]`; leaf `[i]` is filled with sample `indices[i]`. Called from many
        threads at once. Neither argument may be kept after the call.

        **Raises:** `RecordError` or `FormatError`, naming file, record, value and remedy.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """Returns facts for people, in the order to show them, such as `{"format": …, "files": …}`."""
        ...

    def batch_spec(self, batch_size: int) -> Any:
        """Returns `sample_spec` with a leading batch dim, as `parallelize(batch=…)` takes it.

        **Arguments:** `batch_size`: samples in one global batch.
        """
        return batch_spec(self.sample_spec, batch_size)


@runtime_checkable
class Redrawn(Protocol):
    """A source whose samples differ from epoch to epoch, as augmented ones do, or one that wraps another source."""

    def at(self, seed: int | None, epoch: int) -> Source:
        """Returns the source as it is in an epoch: a pure function of seed and epoch, with the same spec and length.

        **Arguments:** `seed`, `epoch`: of the cursor; what is random in sample `i` depends on `(seed, epoch, i)` alone.
        """
        ...


@runtime_checkable
class Prepared(Protocol):
    """A source that can fetch samples ahead, or one that wraps another source."""

    def prepare(self, indices: Indices) -> None:
        """Says that these samples, int64 `[n]`, will be read soon; returns at once and raises nothing of theirs."""
        ...


Box = tuple[tuple[int, int], ...]
"""A part of a sample: `(start, stop)` of every dim."""


@runtime_checkable
class Sliced(Protocol):
    """A source that reads some leaves, or parts of them, for so much less work than whole samples."""

    @property
    def cut_dims(self) -> Sequence[int]:
        """For each leaf, in PyTree order: along how many dims of a sample parts can be read, from the first one on.

        0 means that the leaf is read whole, or left out.
        """
        ...

    def read_slices(self, indices: Indices, boxes: Sequence[Box | None], out: Sequence[NDArray[Any] | None]) -> None:
        """Reads parts of samples into place.

        **Arguments:** `indices`: as those of `Source.read`. `boxes`: for each leaf, in PyTree order, which part of a
        sample; None for a leaf that is not wanted. `out`: for each leaf a C-contiguous array `[n, *sizes of the box]`,
        or None. **Raises:** as `Source.read`.
        """
        ...


@runtime_checkable
class PreparedSlices(Protocol):
    """A source that can fetch parts of samples ahead."""

    def prepare_slices(self, indices: Indices, boxes: Sequence[Box | None]) -> None:
        """Says that parts of samples will be read soon, as `Sliced.read_slices` is given them; returns at once."""
        ...


@runtime_checkable
class Stamped(Protocol):
    """A source that can say what its samples depend on."""

    @property
    def stamp(self) -> str | None:
        """What becomes another when the samples do, such as names, sizes and times of files; None: not known."""
        ...


def stamp_of(source: Source) -> str | None:
    """Returns what becomes another when the samples of a source do; None: not known."""
    return source.stamp if isinstance(source, Stamped) else None


def source_at(source: Source, seed: int | None, epoch: int) -> Source:
    """Returns a source as it is in an epoch: itself, unless it is redrawn in each."""
    return source.at(seed, epoch) if isinstance(source, Redrawn) else source


def prepare(source: Source, indices: Indices) -> None:
    """Tells a source that can fetch ahead which samples will be read soon."""
    if _is_prepared(type(source)):
        cast(Prepared, source).prepare(indices)


@functools.cache
def _is_prepared(kind: type[Any]) -> bool:
    """Says whether a class of sources can fetch ahead; asked for every batch, and slow to find out."""
    return issubclass(kind, Prepared)


def read_samples(source: Source, indices: NDArray[np.int64], out: Any) -> None:
    """Reads samples into place; whatever a source raises becomes a braidax error that names the records."""
    with _naming(source, indices):
        source.read(indices, out)


def read_slices(source: Source, indices: NDArray[np.int64], boxes: Sequence[Box | None], out: Sequence[Any]) -> None:
    """Reads parts of samples into place, as `read_samples`. **Arguments:** as of `Sliced.read_slices`."""
    with _naming(source, indices):
        cast(Sliced, source).read_slices(indices, boxes, out)


@contextlib.contextmanager
def _naming(source: Source, indices: NDArray[np.int64]) -> Generator[None]:
    try:
        yield
    except BraidaxError:
        raise
    except Exception as error:
        listed = [int(index) for index in indices[:8]]
        more = f"… ({len(indices)} in all)" if len(indices) > 8 else ""
        raised = (
            f"source={type(source).__name__} raised {type(error).__name__}: {error}, while it read the records "
            f"{listed}{more}"
        )
        if is_outage(error):
            raise ReadError(
                f"{raised}; that says nothing of the records: check the disk, the server, the network or the memory"
            ) from error
        raise RecordError(f"{raised}; mend the source, or leave these records out") from error


_OF_THE_BYTES = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    AssertionError,
)
_DECODERS = ("PIL", "cv2", "zlib", "_lzma", "lzma", "gzip", "struct", "pickle", "_pickle", "numpy", "xml", "av")


def is_outage(error: BaseException) -> bool:
    """Says whether an error, or one that it came from, may be that of a disk, a server, a connection or the memory.

    What parses bytes raises errors of the kinds that Python itself has for wrong values, or of its own library. All
    else says nothing of the bytes: the next try may succeed.
    """
    seen: BaseException | None = error
    while seen is not None:
        if not _is_of_the_bytes(seen):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def _is_of_the_bytes(error: BaseException) -> bool:
    if isinstance(error, BraidaxError):
        return isinstance(error, RecordError | FormatError)
    if type(error).__module__.partition(".")[0] in _DECODERS:
        return True
    if isinstance(error, OSError):
        return type(error) is OSError and error.errno is None and _module_of(error) == "PIL"  # of images that are cut
    return isinstance(error, _OF_THE_BYTES)


def _module_of(error: BaseException) -> str:
    """Returns the library whose code raised an error."""
    trace, name = error.__traceback__, ""
    while trace is not None:
        name, trace = str(trace.tb_frame.f_globals.get("__name__", "")), trace.tb_next
    return name.partition(".")[0]


VARYING: jax.ShapeDtypeStruct = jax.ShapeDtypeStruct((), np.dtype(object))
"""The spec of a leaf whose size differs from sample to sample: text, bytes, a list of any length.

In a window it is an object array `[n]` of `str`, `bytes` or NumPy arrays. Before a loader can load it, a transform has
to make arrays of one shape of it: `tokenized`, `padded`, `packed`, `mapped`.
"""


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
    if not array.flags.c_contiguous:
        narrow(array[indices], out, indices + first_record, where=where, leaf=leaf)
    elif array.dtype != out.dtype:
        step = max(1, min(len(indices), _NARROWED_BYTES * len(out) // max(1, out.size * array.itemsize)))
        values = np.empty((step, *array.shape[1:]), array.dtype)  # a stretch that stays in the core's cache
        unaligned = not array.flags.aligned and array.size > 0
        for start in range(0, len(indices), step):
            rows, part = indices[start : start + step], out[start : start + step]
            stored = values[: len(rows)]
            if unaligned:
                np.take(_bytes(array), rows, axis=0, out=_bytes(stored), mode="clip")
            else:
                np.take(array, rows, axis=0, out=stored, mode="clip")
            narrow(stored, part, rows + first_record, where=where, leaf=leaf)
    elif array.flags.aligned or not out.size:
        np.take(array, indices, axis=0, out=out, mode="clip")
    else:  # np.take would first make an aligned copy of the whole array; bytes are always aligned
        np.take(_bytes(array), indices, axis=0, out=_bytes(out), mode="clip")


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
                f"{out.dtype}; store smaller values, or keep 64 bits with jax.config.update('jax_enable_x64', True)"
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


def listed(names: Sequence[str], *, limit: int = 8) -> str:
    """Returns names as people read them: their number and the first few, or `"nothing"`."""
    return f"{len(names)}: {', '.join(names[:limit])}{' …' if len(names) > limit else ''}" if names else "nothing"


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(len(array), -1).view(np.uint8)
