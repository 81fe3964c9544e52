"""Samples made of tf.train.Example messages, by a decoder that knows their features from some of them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.records.example import Feature, features, floats, int64s
from braidax.data.formats.records.fields import Columns, Field, fields_of, readable
from braidax.data.formats.records.records import Decoder
from braidax.data.source import Indices
from braidax.data.storage.files import Bytes
from braidax.errors import RecordError

Message = Callable[[Bytes, Callable[[], str]], bytes]
"""Returns the message in the bytes of a record, whose name the second argument returns. **Raises:** `RecordError`."""

_NUMBERS: dict[str, Callable[[Sequence[bytes]], tuple[NDArray[Any], NDArray[np.int64]]]] = {
    "int64": int64s,
    "float": floats,
}


def example_decoder(
    payloads: Sequence[Bytes], columns: Columns | None, message: Message, where: Callable[[int], str], *, name: str
) -> Decoder:
    """Returns what makes samples of records of tf.train.Example.

    **Arguments:** `payloads`: records to look at. `columns`: features to read, in order, or what each of them holds.
    `message`: finds the message in a record. `where`: names a record of `payloads`, and `name` the file, for errors.

    **Raises:** `FormatError` for a feature that cannot be a leaf; `ArgumentError` for columns that are not there;
    `RecordError` for a record that does not decode.
    """
    sampled: dict[str, list[Any]] = {}

    def read(row: int) -> dict[str, Any]:
        features = _features(payloads[row], message, functools.partial(where, row))
        return {feature: _seen(values, where(row)) for feature, values in features.items()}

    for row, record in enumerate(readable(read, range(len(payloads)))):
        for feature in record:
            sampled.setdefault(feature, [None] * row)
        for feature, values in sampled.items():
            values.append(record.get(feature))
    declared = columns if isinstance(columns, Mapping) else {}
    fields: dict[str, _Typed] = {}
    numbers = {feature: _filled(values) for feature, values in sampled.items()}
    for field in fields_of(numbers, columns, where=name):
        first = next(value for value in sampled[field.name] if value is not None)
        kind = "bytes" if isinstance(first, bytes) else "float" if first.dtype.kind == "f" else "int64"
        is_text = declared.get(field.name) is str
        if kind == "float" and declared.get(field.name) is None:
            field = Field(field.name, np.dtype(np.float32), field.shape, field.depth)
        fields[field.name] = _Typed(field, kind, is_text)
    return _Examples(fields, message)


class _Typed:
    """A field, and how its values are stored: `"bytes"`, `"float"` or `"int64"`."""

    def __init__(self, field: Field, kind: str, is_text: bool) -> None:
        self.field = field
        self.kind = kind
        self.is_text = is_text


class _Examples(Decoder):
    def __init__(self, fields: Mapping[str, _Typed], message: Message) -> None:
        self._fields = dict(fields)
        self._message = message

    def widened(self) -> "_Examples":
        """Returns the same with integers of 64 bits as they are stored."""
        wide = {name: _Typed(one.field.widened(), one.kind, one.is_text) for name, one in self._fields.items()}
        return _Examples(wide, self._message)

    @property
    def sample_spec(self) -> Any:
        return {name: typed.field.spec for name, typed in self._fields.items()}

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
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

    def _store_bytes(
        self, column: list[list[bytes]], typed: _Typed, out: NDArray[Any], where: Callable[[int], str]
    ) -> None:
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


def _seen(feature: Feature | None, where: str) -> Any:
    """Returns a feature of a record that is looked at: an array, bytes, or a list of bytes."""
    if feature is None:
        return None
    if feature.kind == "bytes":
        return feature.parts[0] if len(feature.parts) == 1 else feature.parts
    try:
        return _NUMBERS[feature.kind]([b"".join(feature.parts)])[0]
    except ValueError as error:
        raise _undecodable(where, error) from error


def _filled(values: list[Any]) -> list[Any]:
    """Makes numbers of lists of one, and empty lists of numbers that are missing."""
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if not arrays or any(isinstance(value, bytes | list) for value in values):
        return values
    if len(arrays) == len(values) and all(array.size == 1 for array in arrays):
        return [array[0] for array in arrays]
    return [np.empty(0, arrays[0].dtype) if value is None else value for value in values]
