"""Samples made of tf.train.Example messages, by a decoder that knows their features from some of them."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.records.example import Feature, features, floats, int64s, numbers
from braidax.data.formats.records.fields import Columns, Field, fields_of, readable
from braidax.data.formats.records.records import Decoder, WindowDecoder
from braidax.data.formats.rows import Rows, Target
from braidax.data.leaves import Flat
from braidax.data.source import Indices
from braidax.data.storage.files import Bytes, Joined, compiled, joined
from braidax.errors import RecordError

Message = Callable[[Bytes, Callable[[], str]], bytes]
"""Returns the message in the bytes of a record, whose name the second argument returns. **Raises:** `RecordError`."""

Framing = Literal["none", "checked"]
"""What lies around a message in the bytes of a record: nothing, or behind it its checksum, as TFRecord has it."""

_TAGS = {"bytes": 0x0A, "float": 0x12, "int64": 0x1A}  # of the fields of a Feature
_NUMBERS: dict[str, Callable[[Sequence[bytes]], tuple[NDArray[Any], NDArray[np.int64]]]] = {
    "int64": int64s,
    "float": floats,
}


def example_decoder(
    payloads: Sequence[Bytes],
    columns: Columns | None,
    message: Message,
    where: Callable[[int], str],
    *,
    name: str,
    framing: Framing = "none",
) -> Decoder:
    """Returns what makes samples of records of tf.train.Example.

    **Arguments:** `payloads`: records to look at. `columns`: features to read, in order, or what each of them holds.
    `message`: finds the message in a record, which has that `framing`. `where`: names a record of `payloads`, and
    `name` the file, for errors.

    **Raises:** `FormatError` for a feature that cannot be a leaf; `ArgumentError` for columns that are not there;
    `RecordError` for a record that does not decode.
    """
    sampled: dict[str, list[Any]] = {}

    def read(row: int) -> dict[str, Any]:
        here = functools.partial(where, row)
        return {feature: _seen(values, here) for feature, values in _features(payloads[row], message, here).items()}

    for row, record in enumerate(readable(read, range(len(payloads)))):
        for feature in record:
            sampled.setdefault(feature, [None] * row)
        for feature, values in sampled.items():
            values.append(record.get(feature))
    declared = columns if isinstance(columns, Mapping) else {}
    fields: dict[str, _Typed] = {}
    filled = {feature: _filled(values) for feature, values in sampled.items()}
    for field in fields_of(filled, columns, where=name):
        first = next(value for value in sampled[field.name] if value is not None)
        kind = "bytes" if isinstance(first, bytes) else "float" if first.dtype.kind == "f" else "int64"
        is_text = declared.get(field.name) is str
        if kind == "float" and declared.get(field.name) is None:
            field = Field(field.name, np.dtype(np.float32), field.shape, field.depth)
        fields[field.name] = _Typed(field, kind, is_text)
    return _Examples(fields, message, framing)


class _Typed:
    """A field, and how its values are stored: `"bytes"`, `"float"` or `"int64"`."""

    def __init__(self, field: Field, kind: str, is_text: bool) -> None:
        self.field = field
        self.kind = kind
        self.is_text = is_text

    @property
    def form(self) -> str:
        """What compiled code reads: numbers, float32 `"f"`, int32 `"i"` or int64 `"q"`; `"p"`, where values lie."""
        if self.kind == "bytes" or not self.field.is_numeric or self.field.shape is None:
            return "p"
        if self.kind == "float":
            return "f"
        return "i" if self.field.dtype == np.int32 else "q"

    @property
    def read_as(self) -> np.dtype[Any]:
        """The dtype of what is read."""
        return np.dtype({"f": np.float32, "i": np.int32}.get(self.form, np.int64))

    @property
    def count(self) -> int:
        """How many numbers are read of a record."""
        return 1 if self.form == "p" else math.prod(self.field.shape or ())

    @property
    def is_in_place(self) -> bool:
        """Whether what is read is what is loaded."""
        return self.form != "p" and self.field.dtype == self.read_as


class _Examples(WindowDecoder):
    def __init__(self, fields: Mapping[str, _Typed], message: Message, framing: Framing) -> None:
        self._fields = dict(fields)
        self._message = message
        self._framing: Framing = framing
        kinds = bytes(_TAGS[one.kind] for one in fields.values())
        forms = "".join(one.form for one in fields.values()).encode()
        counts = np.array([one.count for one in fields.values()], np.int64)
        self._asked = (tuple(name.encode() for name in fields), kinds, forms, counts)

    def widened(self) -> "_Examples":
        """Returns the same with integers of 64 bits as they are stored."""
        wide = {name: _Typed(one.field.widened(), one.kind, one.is_text) for name, one in self._fields.items()}
        return _Examples(wide, self._message, self._framing)

    @property
    def sample_spec(self) -> Any:
        return {name: typed.field.spec for name, typed in self._fields.items()}

    def flat_values(self, leaf: str) -> Flat | None:
        """Returns how records hold the values of a feature, as `Flattened`: of bytes, one beside the other."""
        one = self._fields.get(leaf)
        return Flat("text" if one.is_text else "bytes", np.dtype(np.uint8)) if one and one.kind == "bytes" else None

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        if compiled() is None:
            self._decode_each(payloads, out, where)
        else:
            self.decode_joined(joined(payloads), indices, out, where)

    def decode_joined(self, records: Joined, indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        reads, num_records = compiled(), len(records.starts)
        if reads is None:
            self._decode_each(records.payloads(), out, where)
            return
        found = {
            name: out[name]
            if one.is_in_place and out[name].flags.c_contiguous
            else np.empty((num_records, 2 if one.form == "p" else one.count), one.read_as)
            for name, one in self._fields.items()
        }
        is_plain = np.empty(num_records, np.bool_)
        is_checked = self._framing == "checked"
        reads.decode(*records, is_checked, *self._asked, tuple(found.values()), is_plain)
        plain, others = np.flatnonzero(is_plain), np.flatnonzero(~is_plain)
        for name, one in self._fields.items():
            if found[name] is not out[name] and plain.size:
                part = _part(out[name], plain)
                self._finish(one, found[name][plain], records, part, lambda row: where(int(plain[row])))
                _put(part, out[name], plain)
        if others.size:  # as few writers write them, or wrong: then this raises what is wrong
            parts = {name: _part(out[name], others) for name in self._fields}
            self._decode_each(records.payloads(others.tolist()), parts, lambda row: where(int(others[row])))
            for name, part in parts.items():
                _put(part, out[name], others)

    def _finish(self, one: _Typed, found: NDArray[Any], records: Joined, out: Any, where: Callable[[int], str]) -> None:
        """Makes a leaf of numbers that were read in another dtype, or of the places of values."""
        if one.form != "p":
            one.field.store_flat(found.reshape(-1), np.full(len(found), one.count), out, where)
            return
        if isinstance(out, Rows):
            filled = out.place(records.data, *np.ascontiguousarray(found.T))
            wrong = [[bytes(records.data[at : at + size])] for at, size in found[filled : filled + 1].tolist()]
            self._store_bytes(wrong, one, np.empty(len(wrong), object), lambda _: where(filled))
            return
        view = records.data.data
        column = [[bytes(view[start : start + length])] for start, length in found.tolist()]
        if one.kind == "bytes":
            self._store_bytes(column, one, out, where)
        else:
            self._store_numbers(column, one, out, where)

    def _decode_each(self, payloads: Sequence[Bytes], out: Any, where: Callable[[int], str]) -> None:
        """Decodes records one by one, whatever way they are written in."""
        columns: dict[str, list[list[bytes]]] = {name: [] for name in self._fields}
        for row, payload in enumerate(payloads):
            record = _features(payload, self._message, functools.partial(where, row))
            for name, typed in self._fields.items():
                columns[name].append(_parts(record.get(name), name, typed, functools.partial(where, row)))
        for name, typed in self._fields.items():
            if typed.kind == "bytes":
                self._store_bytes(columns[name], typed, out[name], where)
            else:
                self._store_numbers(columns[name], typed, out[name], where)

    def _store_bytes(self, column: list[list[bytes]], typed: _Typed, out: Target, where: Callable[[int], str]) -> None:
        if isinstance(out, Rows):
            as_bytes = _Typed(typed.field, typed.kind, is_text=False)
            self._store_bytes(column, as_bytes, np.empty(len(column), object), where)
            filled = out.place_each([parts[0] for parts in column])
            wrong = column[filled : filled + 1]
            self._store_bytes(wrong, typed, np.empty(len(wrong), object), lambda _: where(filled))
            return
        for row, parts in enumerate(column):
            if len(parts) != 1:
                raise RecordError(
                    f"{where(row)}: feature {typed.field.name!r} has {len(parts)} values, expected 1 as in the records "
                    "that were looked at first; mend the record, or leave the feature out with columns="
                )
            try:
                out[row] = parts[0].decode() if typed.is_text else parts[0]
            except UnicodeDecodeError as error:
                raise RecordError(
                    f"{where(row)}: feature {typed.field.name!r} is no UTF-8 text ({error}); read it as bytes: leave "
                    "its type out of columns="
                ) from error

    def _store_numbers(
        self, column: list[list[bytes]], typed: _Typed, out: NDArray[Any], where: Callable[[int], str]
    ) -> None:
        decode = _NUMBERS[typed.kind]
        packed = [parts[0] if len(parts) == 1 else b"".join(parts) for parts in column]
        try:
            values, counts = decode(packed)
        except ValueError as error:
            row = next(row for row, part in enumerate(packed) if not _decodes(decode, part))
            raise _undecodable(where(row), error) from error
        typed.field.store_flat(values, counts, out, where)


def _part(leaf: Target, rows: Indices) -> Target:
    """Returns memory for some rows of a leaf: its own for all of them, and where it takes them one by one."""
    if isinstance(leaf, Rows):
        return leaf[rows]
    return leaf if len(rows) == len(leaf) else np.empty((len(rows), *leaf.shape[1:]), leaf.dtype)


def _put(part: Target, leaf: Target, rows: Indices) -> None:
    """Copies some rows of a leaf into place, if they are not there yet."""
    if part is not leaf and isinstance(leaf, np.ndarray):
        leaf[rows] = part


def _parts(feature: Feature | None, name: str, typed: _Typed, where: Callable[[], str]) -> list[bytes]:
    if feature is None:
        return []
    if feature.kind != typed.kind:
        raise RecordError(
            f"{where()}: feature {name!r} is a list of {feature.kind}, expected {typed.kind} as in the records that "
            "were looked at first; write the records with one type, or leave the feature out with columns="
        )
    return feature.parts


def _features(payload: Bytes, message: Message, where: Callable[[], str]) -> dict[str, Feature]:
    try:
        return features(message(payload, where))
    except ValueError as error:
        raise _undecodable(where(), error) from error


def _undecodable(where: str, error: Exception) -> RecordError:
    return RecordError(
        f"{where}: is no tf.train.Example ({error}); expected one in every record: write the records as that"
    )


def _decodes(decode: Callable[[Sequence[bytes]], Any], packed: bytes) -> bool:
    try:
        decode([packed])
    except ValueError:
        return False
    return True


def _seen(feature: Feature | None, where: Callable[[], str]) -> Any:
    """Returns a feature of a record that is looked at: an array, bytes, or a list of bytes."""
    if feature is None:
        return None
    if feature.kind == "bytes":
        return feature.parts[0] if len(feature.parts) == 1 else feature.parts
    try:
        return numbers(feature.kind, b"".join(feature.parts))
    except ValueError as error:
        raise _undecodable(where(), error) from error


def _filled(values: list[Any]) -> list[Any]:
    """Makes numbers of lists of one, and empty lists of numbers that are missing."""
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if not arrays or any(isinstance(value, bytes | list) for value in values):
        return values
    if len(arrays) == len(values) and all(array.size == 1 for array in arrays):
        return [array[0] for array in arrays]
    return [np.empty(0, arrays[0].dtype) if value is None else value for value in values]
