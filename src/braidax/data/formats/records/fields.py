"""Fields of records: what the values under each name are, told by a sample of the records or declared, and stored."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.source import VARYING, is_varying, loader_dtype
from braidax.errors import ArgumentError, FormatError, RecordError

Columns = Sequence[str] | Mapping[str, Any]
"""Names of the fields to read, in order; or, of each name, what it holds.

That is a dtype (`"float32"`, `str`), a `jax.ShapeDtypeStruct` with the shape of one sample, in which `None` stands for
a size that differs from sample to sample, or `VARYING`.
"""

NUM_SAMPLED = 256  # records, from the first to the last, that tell what a field holds
_T = TypeVar("_T")
_TEXT = np.dtype(object)
_WIDE = {"b": np.dtype(bool), "i": np.dtype(np.int64), "u": np.dtype(np.uint64), "f": np.dtype(np.float64)}


@dataclass(frozen=True)
class Field:
    """What the values under one name are.

    `dtype`: of its numbers as they are loaded, or object for text and bytes. `shape`: of one sample, None where it
    differs from sample to sample. `depth`: of lists within lists.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    depth: int = 0

    @property
    def is_numeric(self) -> bool:
        """Whether it holds numbers or bools, or lists of them."""
        return self.dtype != _TEXT

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """The spec of its leaf."""
        fixed = self.is_numeric and self.shape is not None
        return jax.ShapeDtypeStruct(self.shape or (), self.dtype) if fixed else VARYING

    @property
    def wide(self) -> np.dtype[Any]:
        """The dtype of 64 bits in which its numbers are checked; that of bools for bools."""
        return _WIDE.get(self.dtype.kind, _WIDE["f"])

    def store(self, values: Sequence[Any] | NDArray[Any], out: NDArray[Any], where: Callable[[int], str]) -> None:
        """Puts values into place.

        **Arguments:** `values`: one a record: numbers, text, bytes, lists or arrays. `out`: as `Source.read` gets it.
        `where`: names the record of a value, for errors.

        **Raises:** `RecordError` for a value of another shape, or one that does not fit in the dtype.
        """
        if not self.is_numeric:
            out[:] = values
        elif self.shape is None:
            for row, value in enumerate(values):
                out[row] = self._numbers([value], lambda _, row=row: where(row))[0]
        else:
            if self.shape:
                self._check_shapes(values, where)
            out[...] = self._numbers(values, where).reshape(out.shape)

    def store_flat(
        self, values: NDArray[Any], counts: NDArray[np.int64], out: NDArray[Any], where: Callable[[int], str]
    ) -> None:
        """Puts the numbers of many records into place, as `store`, where they lie one record behind the other.

        **Arguments:** `values`: `[sum(counts)]`. `counts`: int64 `[n]`, numbers in each record.
        """
        numbers = self._numbers(values, lambda place: where(int(np.searchsorted(np.cumsum(counts), place, "right"))))
        if self.shape is None:
            for row, part in enumerate(np.split(numbers, np.cumsum(counts)[:-1])):
                out[row] = part.copy()
            return
        wrong = np.flatnonzero(counts != math.prod(self.shape))
        if wrong.size:
            raise self._of_another_shape((int(counts[wrong[0]]),), where(int(wrong[0])))
        out[...] = numbers.reshape(out.shape)

    def _check_shapes(self, values: Sequence[Any] | NDArray[Any], where: Callable[[int], str]) -> None:
        shape = self.shape or ()
        for row, value in enumerate(values):
            found = (len(value),) if len(shape) == 1 else _shape(value)
            if found != shape:
                raise self._of_another_shape(found, where(row))

    def _of_another_shape(self, found: tuple[int, ...], where: str) -> RecordError:
        return RecordError(
            f"{where}: field {self.name!r} has the shape {list(found)}, expected {list(self.shape or ())} as in the "
            "records that were looked at first; pad the data, leave the field out, or say with "
            f"columns={{{self.name!r}: braidax.data.VARYING, …}} that its size differs"
        )

    def _numbers(self, values: Sequence[Any] | NDArray[Any], where: Callable[[int], str]) -> NDArray[Any]:
        """Returns values of one shape as an array of the loaded dtype, each checked to fit."""
        try:
            found = np.asarray(values, self.wide)
        except (OverflowError, ValueError, TypeError) as error:
            row = next((row for row, value in enumerate(values) if not self._fits(value)), 0)
            raise RecordError(
                f"{where(row)}: field {self.name!r} is {_shown(values[row])}, which does not become {self.dtype} "
                f"({error}); mend the record, or leave the field out with columns="
            ) from error
        if self.dtype != found.dtype and self.dtype.kind != "b":
            info = np.iinfo(self.dtype) if self.dtype.kind in "iu" else jax.numpy.finfo(self.dtype)
            misfit = (found < float(info.min)) | (found > float(info.max))
            if found.dtype.kind == "f":
                misfit &= np.isfinite(found)
            if misfit.any():
                row = int(np.argwhere(misfit)[0][0])
                value = found[row][misfit[row]].flat[0]
                raise RecordError(
                    f"{where(row)}: field {self.name!r} holds {value}, which does not fit in {self.dtype}; store "
                    "smaller values, declare another dtype with columns=, or keep 64 bits with "
                    "jax.config.update('jax_enable_x64', True)"
                )
        return found.astype(self.dtype)

    def _fits(self, value: Any) -> bool:
        try:
            np.asarray(value, self.wide)
        except (OverflowError, ValueError, TypeError):
            return False
        return True


def fields_of(sampled: Mapping[str, Sequence[Any]], columns: Columns | None, *, where: str) -> list[Field]:
    """Returns the fields to read, by what a sample of the records holds and by what the user declares.

    **Arguments:** `sampled`: name → values, None for one that is missing. `columns`: as the user gave them; all fields
    when None. `where`: the file, for errors.

    **Raises:** `ArgumentError` for columns that are not there; `FormatError` for a field that cannot be a leaf.
    """
    missing = [name for name in columns or () if name not in sampled]
    if missing or isinstance(columns, str) or (columns is not None and not columns):
        raise ArgumentError(
            f"columns={columns!r}: expected names of fields of {where}, which has {list(sampled)}"
            + (f" and no {missing}" if missing else "")
        )
    declared = columns if isinstance(columns, Mapping) else dict.fromkeys(columns or sampled)
    found: list[Field] = []
    for name, declaration in declared.items():
        field = _seen(name, sampled[name], where)
        if isinstance(field, str):
            usable = [other for other in sampled if not isinstance(_seen(other, sampled[other], where), str)]
            raise FormatError(
                f"{where}: field {name!r} {field}; expected numbers, text, or lists of numbers in every record: mend "
                f"the data, or read the others with columns={usable}"
            )
        found.append(field if declaration is None else _declared(field, declaration, where))
    return found


def _seen(name: str, values: Sequence[Any], where: str) -> Field | str:
    """Returns what a field is by some of its values, or why it is none."""
    absent = sum(value is None for value in values)
    if absent:
        return f"is null or missing in {absent} of {len(values)} records looked at"
    texts = sum(isinstance(value, str | bytes) for value in values)
    if texts == len(values):
        return Field(name, _TEXT, None)
    if texts or any(isinstance(value, dict) for value in values):
        return "holds objects, or text in some records only"
    try:
        arrays = [np.asarray(value) for value in values]
    except (ValueError, OverflowError):
        return "holds lists of lists of different lengths, or of mixed types"
    kinds = {array.dtype.kind for array in arrays if array.size}
    depths = {array.ndim for array in arrays if array.size or array.ndim == 0}
    if len(depths) > 1 or not kinds <= set("biuf") or ("b" in kinds and len(kinds) > 1):
        return "holds values of several types, or lists of something else than numbers"
    stored = np.dtype(bool) if kinds == {"b"} else np.dtype(np.int64) if kinds <= {"i", "u"} else np.dtype(np.float64)
    if not kinds:
        stored = np.dtype(np.float64)
    shapes = {array.shape for array in arrays}
    shape = shapes.pop() if len(shapes) == 1 else None
    return Field(name, loader_dtype(stored, where=where, leaf=name), shape, max(depths, default=1))


def _declared(seen: Field, declaration: Any, where: str) -> Field:
    shape, dtype = seen.shape, declaration
    if isinstance(declaration, jax.ShapeDtypeStruct):
        if is_varying(declaration):
            return Field(seen.name, seen.dtype, None, seen.depth)
        given = cast("tuple[int | None, ...]", tuple(declaration.shape))
        shape, dtype = None if None in given else cast("tuple[int, ...]", given), declaration.dtype
    try:
        dtype = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentError(
            f"columns={{{seen.name!r}: {declaration!r}}}: {error}; expected a dtype such as 'float32' or str, a "
            "jax.ShapeDtypeStruct, or braidax.data.VARYING"
        ) from error
    if dtype.kind in "UO":
        return Field(seen.name, _TEXT, None)
    return Field(seen.name, loader_dtype(dtype, where=where, leaf=seen.name), shape, seen.depth)


def sampled_indices(num_records: int) -> NDArray[np.int64]:
    """Returns the numbers of the records to look at: the first, the last, and others between them."""
    return np.unique(np.linspace(0, num_records - 1, min(num_records, NUM_SAMPLED)).astype(np.int64))


def readable(read: Callable[[int], _T], numbers: Iterable[int]) -> list[_T]:
    """Returns what is read of some records, without those that cannot be: they are errors when they are asked for.

    **Raises:** the first `RecordError` when none can be read.
    """
    found: list[_T] = []
    first_error: RecordError | None = None
    for number in numbers:
        try:
            found.append(read(number))
        except RecordError as error:
            first_error = first_error or error
    if not found and first_error is not None:
        raise first_error
    return found


def _shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of lists within lists; -1 where they differ."""
    try:
        return np.shape(value)
    except ValueError:
        return (len(value), -1)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
