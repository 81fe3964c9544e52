"""JSON Lines: an object a line, whose top-level fields are the leaves."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from braidax.data.formats.records.fields import Columns, Field, fields_of, readable, sampled_indices
from braidax.data.formats.records.index import RecordIndex
from braidax.data.formats.records.lines import scan_filled_lines
from braidax.data.formats.records.records import Decoder, RecordSource
from braidax.data.source import Indices
from braidax.data.storage.files import Bytes, Files
from braidax.errors import FormatError, RecordError
from braidax.extras import import_msgspec

_PURPOSE = "reading JSON Lines"


def open_jsonl(files: Files, *, columns: Columns | None = None, cache: Path | None = None) -> RecordSource:
    """Opens files of one JSON object a line; empty lines are no records.

    Numbers and bools are leaves `[]`, text is of varying size, lists of numbers are arrays: of one shape where those of
    all records that are looked at have one, else of varying size.

    **Arguments:** `files`: UTF-8. `columns`: fields to read, in order, or what each of them holds; see `Columns`.
    `cache`: as `RecordIndex.build`.

    **Raises:** `FormatError` for a field that cannot be a leaf; `ArgumentError` for columns that are not there;
    `RecordError` for a record that is no JSON object; `MissingExtra`.
    """
    index = RecordIndex.build(files, scan_filled_lines, kind="filled-lines", cache=cache)
    if not len(index):
        raise FormatError(f"{files.names[0]}: holds 0 records in {len(files.names)} file(s); expected at least one")
    ranges = index.ranges(sampled_indices(len(index)))
    json = import_msgspec(purpose=_PURPOSE).json
    payloads = files.read(ranges)

    def read(row: int) -> dict[str, Any]:
        where = f"{files.names[int(ranges.file[row])]}, the record at byte {int(ranges.offset[row]):,}"
        record = _decoded(json.decode, payloads[row], where)
        if not isinstance(record, dict):
            raise RecordError(f"{where}: is {type(record).__name__}, expected an object {{…}} on every line")
        return cast("dict[str, Any]", record)

    sampled: dict[str, list[Any]] = {}
    for row, record in enumerate(readable(read, range(len(payloads)))):
        for name in record:
            sampled.setdefault(name, [None] * row)
        for name, values in sampled.items():
            values.append(record.get(name))
    fields = fields_of(sampled, columns, where=files.names[0])
    return RecordSource(files, index, _Objects(fields), {"format": "JSON Lines"})


class _Objects(Decoder):
    """Objects of which only the fields that are read become Python's, each checked to be of its type."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = list(fields)
        msgspec: Any = import_msgspec(purpose=_PURPOSE)
        names = {f"field{number}": field.name for number, field in enumerate(fields)}
        kinds = [(short, _python_type(field)) for short, field in zip(names, fields, strict=True)]
        record = msgspec.defstruct("Record", kinds, rename=names, gc=False)
        self._decode: Callable[[Bytes], Any] = msgspec.json.Decoder(record).decode
        self._astuple: Callable[[Any], tuple[Any, ...]] = msgspec.structs.astuple

    def __reduce__(self) -> tuple[Any, ...]:
        return _Objects, (self._fields,)

    @property
    def sample_spec(self) -> Any:
        return {field.name: field.spec for field in self._fields}

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        try:
            records = [self._decode(payload) for payload in payloads]
        except (ValueError, RecursionError):  # errors of msgspec are ValueErrors
            records = [_decoded(self._decode, payload, where(row)) for row, payload in enumerate(payloads)]
        columns = zip(*map(self._astuple, records), strict=True)
        for field, values in zip(self._fields, columns, strict=True):
            field.store(values, out[field.name], where)


def _decoded(decode: Callable[[Bytes], Any], payload: Bytes, where: str) -> Any:
    try:
        return decode(payload)
    except (ValueError, RecursionError) as error:
        shown = f"{bytes(payload[:40])!r}{'…' if len(payload) > 40 else ''}"
        raise RecordError(
            f"{where}: {shown} does not decode ({error}); mend the record, or leave a field out or declare its type "
            "with columns="
        ) from error


def _python_type(field: Field) -> Any:
    """Returns the type that msgspec demands of a field's values."""
    if not field.is_numeric:
        return str
    kind: Any = {"b": bool, "f": float}.get(np.dtype(field.wide).kind, int)
    return functools.reduce(lambda inner, _: list[inner], range(field.depth), kind)
