"""Fields of records: what the values under each name are, told by a sample of the records or declared, and stored."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar, cast

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.tables.columns import VALID
from braidax.data.leaves import smaller
from braidax.data.source import VARYING, is_varying, loader_dtype
from braidax.errors import ArgumentError, FormatError, RecordError

Columns = Sequence[str] | Mapping[str, Any]
"""Names of the fields to read, in order; or, of each name, what it holds.

That is a dtype (`"float32"`, `str`), a `jax.ShapeDtypeStruct` with the shape of one sample, in which `None` stands for
a size that differs from sample to sample, or `VARYING`.
"""

Nulls = Literal["refused", "masked"]
"""Whether a value that is null, or missing, is an error of its record, or is told by a mask beside the values."""

NUM_SAMPLED = 256  # records, from the first to the last, that tell what a field holds
_T = TypeVar("_T")
_TEXT = np.dtype(object)
_WIDE = {"b": np.dtype(bool), "i": np.dtype(np.int64), "u": np.dtype(np.uint64), "f": np.dtype(np.float64)}


class Parsed(NamedTuple):
    """A column of some records. **Fields:** `values`: as `Field.store` takes them. `is_valid`: which are no nulls."""

    values: Any
    is_valid: NDArray[np.bool_]


@dataclass(frozen=True)
class Field:
    """What the values under one name are.

    `dtype`: of its numbers as they are loaded, or object for text and bytes. `shape`: of one sample, None where it
    differs from sample to sample. `depth`: of lists within lists. `wider`: of integers of 64 bits, their own dtype.
    `nulls`: what becomes of them. `mask_of`: of the mask of a field, that field's name.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None
    depth: int = 0
    wider: np.dtype[Any] | None = None
    nulls: Nulls = "refused"
    mask_of: str = ""

    def widened(self) -> "Field":
        """Returns the same with integers of 64 bits as they are stored."""
        return self if self.wider is None else replace(self, dtype=self.wider)

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

    def store_valid(
        self,
        values: Sequence[Any] | NDArray[Any],
        is_valid: NDArray[np.bool_],
        out: NDArray[Any],
        where: Callable[[int], str],
    ) -> None:
        """Puts values into place, as `store`, and NaN, 0, False, or what is empty where there are none.

        **Arguments:** `is_valid`: bool `[n]`, which records have a value; what stands in `values` for others is not
        looked at.
        """
        kept, nulls = np.flatnonzero(is_valid), np.flatnonzero(~is_valid)
        held = values[kept] if isinstance(values, np.ndarray) else [values[row] for row in kept.tolist()]
        part = np.empty((len(kept), *out.shape[1:]), out.dtype)
        self.store(held, part, lambda row: where(int(kept[row])))
        out[kept] = part
        if not self.is_numeric:
            out[nulls] = ""
        elif self.shape is None:
            for row in nulls.tolist():
                out[row] = np.empty((0,) * max(1, self.depth), self.dtype)
        else:
            out[nulls] = np.nan if jax.numpy.issubdtype(out.dtype, np.inexact) else 0

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
                    f"smaller values, {smaller(found.dtype)}declare another dtype with columns=, or keep 64 bits with "
                    "jax.config.update('jax_enable_x64', True)"
                )
        return found.astype(self.dtype)

    def _fits(self, value: Any) -> bool:
        try:
            np.asarray(value, self.wide)
        except (OverflowError, ValueError, TypeError):
            return False
        return True


def fields_of(
    sampled: Mapping[str, Sequence[Any]], columns: Columns | None, *, where: str, nulls: Nulls = "refused"
) -> list[Field]:
    """Returns the fields to read, by what a sample of the records holds and by what the user declares.

    **Arguments:** `sampled`: name → values, None for one that is missing. `columns`: as the user gave them; all fields
    when None. `where`: the file, for errors. `nulls`: with `"masked"`, a field that lacks values, or whose mask is
    among the columns, has a mask: a field of bools, `NAME.is_valid`.

    **Raises:** `ArgumentError` for columns that are not there; `FormatError` for a field that cannot be a leaf.
    """
    masks = {name + VALID: name for name in sampled if nulls == "masked" and name + VALID not in sampled}
    missing = [name for name in columns or () if name not in sampled and name not in masks]
    if missing or isinstance(columns, str) or (columns is not None and not columns):
        raise ArgumentError(
            f"columns={columns!r}: expected names of fields of {where}, which has {list(sampled)}"
            + (f" and no {missing}" if missing else "")
        )
    declared = columns if isinstance(columns, Mapping) else dict.fromkeys(columns or sampled)
    found: list[Field] = []
    for name, declaration in declared.items():
        of = name if name in sampled else masks[name]
        field = _seen(of, sampled[of], where, nulls)
        if isinstance(field, str):
            usable = [other for other in sampled if not isinstance(_seen(other, sampled[other], where, nulls), str)]
            raise FormatError(
                f"{where}: field {of!r} {field}; expected numbers, text, or lists of numbers in every record: mend "
                f"the data, or read the others with columns={usable}"
            )
        if of != name:
            found.append(_mask(of))
        else:
            found.append(field if declaration is None else _declared(field, declaration, where))
    return found if nulls == "refused" else _masked(found, sampled, where)


def _masked(fields: Sequence[Field], sampled: Mapping[str, Sequence[Any]], where: str) -> list[Field]:
    """Puts a mask behind each field that lacks values and was not given with one."""
    asked = {field.mask_of for field in fields}
    found: list[Field] = []
    for field in fields:
        lacks = not field.mask_of and any(value is None for value in sampled[field.name])
        if lacks and field.name + VALID in sampled:
            raise FormatError(
                f"{where}: field {field.name!r} holds nulls, and the leaf that says where, {field.name + VALID!r}, has "
                "the name of another field: rename that one, or leave both out with columns="
            )
        found.append(replace(field, nulls="masked") if lacks or field.name in asked else field)
        found += [_mask(field.name)] if lacks and field.name not in asked else []
    return found


def _mask(name: str) -> Field:
    return Field(name + VALID, np.dtype(np.bool_), (), mask_of=name)


def _seen(name: str, values: Sequence[Any], where: str, nulls: Nulls) -> Field | str:
    """Returns what a field is by some of its values, or why it is none."""
    held = [value for value in values if value is not None]
    if not held or (nulls == "refused" and len(held) < len(values)):
        return f"is null or missing in {len(values) - len(held)} of {len(values)} records looked at"
    values = held
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
    stored = _stored(arrays, kinds)
    shapes = {array.shape for array in arrays}
    shape = shapes.pop() if len(shapes) == 1 else None
    wider = stored if stored.kind in "iu" else None
    return Field(name, loader_dtype(stored, where=where, leaf=name), shape, max(depths, default=1), wider)


def _stored(arrays: Sequence[NDArray[Any]], kinds: set[str]) -> np.dtype[Any]:
    """Returns the dtype of 64 bits that numbers of these kinds have; without a sign where one needs all 64 of them."""
    if kinds == {"b"}:
        return np.dtype(np.bool_)
    if not kinds or not kinds <= {"i", "u"}:
        return np.dtype(np.float64)
    needs_all = any(array.size and int(array.max()) > np.iinfo(np.int64).max for array in arrays)
    is_positive = all(int(array.min()) >= 0 for array in arrays if array.size)
    return np.dtype(np.uint64 if needs_all and is_positive else np.int64)


def _declared(seen: Field, declaration: Any, where: str) -> Field:
    shape, dtype = seen.shape, declaration
    if isinstance(declaration, jax.ShapeDtypeStruct):
        if is_varying(declaration):
            return replace(seen, shape=None)
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
    if not seen.is_numeric and not isinstance(declaration, jax.ShapeDtypeStruct):
        shape = ()  # numbers, as those of CSV, that not all looked like some
    wider = dtype if dtype.kind in "iu" and dtype.itemsize == 8 else None
    return Field(seen.name, loader_dtype(dtype, where=where, leaf=seen.name), shape, seen.depth, wider)


def sampled_indices(num_records: int) -> NDArray[np.int64]:
    """Returns the numbers of the records to look at: the first, the last, and others between them."""
    return np.unique(np.linspace(0, num_records - 1, min(num_records, NUM_SAMPLED)).astype(np.int64))


def readable(read: Callable[[int], _T], numbers: Iterable[int]) -> list[_T]:
    """Returns what is read of some records, without those that cannot be: they are errors when they are asked for.

    **Raises:** the first `RecordError` when none can be read.
    """
    found: list[_T] = []
    first_error: RecordError | None = None
    try:
        for number in numbers:
            try:
                found.append(read(number))
            except RecordError as error:
                first_error = first_error or error
        if not found and first_error is not None:
            raise first_error
        return found
    finally:
        del first_error  # its traceback holds this call, and with it the files


def _shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of lists within lists; -1 where they differ."""
    try:
        return np.shape(value)
    except ValueError:
        return (len(value), -1)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
