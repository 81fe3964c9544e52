"""Arrays whose length differs from sample to sample: what they have in one, and how they are put together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.rows import Rows
from braidax.data.leaves import Kind
from braidax.data.source import Indices, Source, allocate, is_varying, loader_dtype, narrow
from braidax.errors import ArgumentError, RecordError

_BYTE = np.dtype(np.uint8)
_PYTHON: Mapping[Kind, type[str | bytes]] = {"text": str, "bytes": bytes}
_LOOK_AT = 16  # records, until one is found that is not empty: an empty list has no dtype


@dataclass(frozen=True)
class Ragged:
    """What the arrays of one varying leaf share.

    **Fields:** `leaf`: its name. `stored`, `loaded`: the dtype of the arrays, and the one in which JAX gets them.
    `shape`: of one item, the arrays' shape behind their first dim. `kind`: text and bytes are arrays of bytes, too.
    """

    leaf: str
    stored: np.dtype[Any]
    loaded: np.dtype[Any]
    shape: tuple[int, ...] = ()
    kind: Kind = "numbers"

    @classmethod
    def of(
        cls, source: Source, leaf: str, *, needed_by: str, texts: Literal["refused", "as bytes"] = "refused"
    ) -> "Ragged":
        """Looks at the first records of a source, or asks it how it holds the values.

        **Arguments:** `texts`: what becomes of text and bytes.

        **Raises:** `ArgumentError` if `leaf` is no varying leaf; `RecordError` if it holds no arrays of numbers.
        """
        check_varying(source, leaf, needed_by=needed_by)
        if not len(source):
            raise ArgumentError(f"{needed_by}: source has no samples; give a source that has some")
        indices = np.arange(min(len(source), _LOOK_AT), dtype=np.int64)
        window = allocate(source.sample_spec, len(indices))
        source.read(indices, window)
        values = window[leaf].tolist()
        for kind, python in _PYTHON.items() if texts == "as bytes" else ():
            if all(isinstance(value, python) for value in values):
                return cls(leaf, _BYTE, _BYTE, (), kind)
        arrays = [_array(value, leaf, record) for record, value in enumerate(values)]
        first = next((array for array in arrays if array.size), arrays[0])
        loaded = loader_dtype(first.dtype, where=needed_by, leaf=leaf)
        return cls(leaf, first.dtype, loaded, first.shape[1:])

    def arrays(self, values: NDArray[Any], indices: Indices) -> list[NDArray[Any]]:
        """Returns the arrays of a window, all of the dtype `stored`.

        **Arguments:** `values`: the object array `[n]` that a source filled. `indices`: int64 `[n]`, for errors.

        **Raises:** `RecordError` for a record that is no array, or one of another dtype or shape.
        """
        found: list[NDArray[Any]] = values.tolist()
        for place, array in enumerate(found):
            if type(array) is np.ndarray and array.dtype == self.stored and array.shape[1:] == self.shape:
                continue
            array = _array(array, self.leaf, int(indices[place]))
            if not array.size and array.ndim == 1:
                found[place] = np.empty((0, *self.shape), self.stored)
            elif array.dtype != self.stored or array.shape[1:] != self.shape:
                raise RecordError(
                    f"record {indices[place]}: leaf {self.leaf!r} is {array.dtype} {list(array.shape)}, expected "
                    f"{self.stored} [any, {', '.join(map(str, self.shape))}] as in the first records; convert it with "
                    "transform="
                )
        return found

    def fill(self, values: NDArray[Any], rows: Rows, indices: Indices) -> None:
        """Fills rows with the texts or bytes of a window. **Arguments:** as of `arrays`.

        **Raises:** `RecordError` for a record that holds something else, or text that UTF-8 cannot hold.
        """
        python, most = _PYTHON[self.kind], rows.most_bytes
        pieces: list[bytes] = []
        for place, value in enumerate(values.tolist()):
            if not isinstance(value, python):
                raise RecordError(
                    f"record {indices[place]}: leaf {self.leaf!r} is a {type(value).__name__}, expected "
                    f"{python.__name__} as in the first records; convert it with transform="
                )
            try:
                head = value[:most]
                pieces.append(head.encode() if isinstance(head, str) else head)
            except UnicodeEncodeError as error:
                raise RecordError(
                    f"record {indices[place]}: leaf {self.leaf!r} is no text that UTF-8 can hold ({error}); mend it, "
                    "or leave the record out"
                ) from error
        rows.place_each(pieces)

    def join(self, parts: Sequence[NDArray[Any]], out: NDArray[Any], indices: Indices) -> None:
        """Writes arrays one behind the other, in one pass.

        **Arguments:** `parts`: of the dtype `stored`, together as many items as `out` has. `out`: C-contiguous
        `[n, length, *shape]` of the dtype `loaded`. `indices`: int64 `[n]`, the records of the rows, for errors.

        **Raises:** `RecordError` for a number that does not fit in `loaded`.
        """
        if not parts:
            return
        flat = out.reshape(-1, *self.shape)
        if np.can_cast(self.stored, self.loaded, "safe"):
            np.concatenate(parts, out=flat)
        else:
            values = np.concatenate(parts).reshape(out.shape)
            narrow(values, out, indices, where="source", leaf=self.leaf)


def lengths_of(values: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the lengths, int64 `[n]`, of the arrays in an object array `[n]`."""
    return np.fromiter(map(len, values.tolist()), np.int64, len(values))


def fields(source: Source, *, needed_by: str) -> Mapping[str, Any]:
    """Returns a source's leaves by their names. **Raises:** `ArgumentError` if its samples are no mappings."""
    spec = source.sample_spec
    if not isinstance(spec, Mapping):
        raise ArgumentError(f"{needed_by}: samples must be mappings, got {spec}; return a dict from transform=")
    return cast("Mapping[str, Any]", spec)


def check_varying(source: Source, leaf: str, *, needed_by: str) -> None:
    """Raises `ArgumentError` unless `leaf` is a leaf of varying size."""
    spec = fields(source, needed_by=needed_by)
    varying = [name for name, found in spec.items() if hasattr(found, "dtype") and is_varying(found)]
    if leaf not in varying:
        got = f"it is {spec[leaf]}" if leaf in spec else f"samples have {sorted(spec)}"
        raise ArgumentError(
            f"{needed_by}: leaf={leaf!r} is no leaf of varying size: {got}; expected one of {varying or 'them'}"
        )


def check_absent(present: Iterable[str], added: Iterable[str], *, needed_by: str) -> None:
    """Raises `ArgumentError` if a leaf that is to be added is there already."""
    both = set(present) & set(added)
    if both:
        raise ArgumentError(
            f"{needed_by} adds the leaf {min(both)!r}, but samples have one already; leave it out with columns=, or "
            "rename it with transform="
        )


def _array(value: Any, leaf: str, record: int) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.ndim < 1 or value.dtype.kind not in "biufcV":
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise RecordError(
            f"record {record}: leaf {leaf!r} is {kind}; expected an array of numbers [any length, ...]: turn text into "
            "numbers with braidax.data.tokenized"
        )
    return cast("NDArray[Any]", value)
