"""JSON Lines: an object a line, whose top-level fields are the leaves."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from braidax.data.formats.records.fields import Columns, Field, fields_of, readable, sampled_indices
from braidax.data.formats.records.index import RecordIndex
from braidax.data.formats.records.lines import scan_filled_lines
from braidax.data.formats.records.records import Decoder, RecordSource
from braidax.data.formats.tables.columns import VALID
from braidax.data.source import Indices
from braidax.data.storage.files import Bytes, Files
from braidax.errors import FormatError, RecordError
from braidax.extras import import_msgspec

_PURPOSE = "reading JSON Lines"
_UNREADABLE = re.compile(r'["\\\x00-\x1f]')  # in names of fields, which msgspec looks for as they are written


def open_jsonl(files: Files, *, columns: Columns | None = None, cache: Path | None = None) -> RecordSource:
    """Opens files of one JSON object a line; empty lines are no records.

    Numbers and bools are leaves `[]`, text is of varying size, lists of numbers are arrays: of one shape where those of
    all records that are looked at have one, else of varying size. A field that is null or missing in some of these
    records has a mask beside it, `NAME.is_valid`; a list with a null in it is null as a whole.

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
            values.append(_whole(record.get(name)))
    fields = fields_of(sampled, columns, where=files.names[0], nulls="masked")
    if wrong := [name for field in fields if _UNREADABLE.search(name := field.mask_of or field.name)]:
        others = [field.name for field in fields if not _UNREADABLE.search(field.name)]
        raise FormatError(
            f"{files.names[0]}: field {wrong[0]!r} has a quote, a backslash or a control character in its name; "
            f"expected names without: mend the data, or read the others with columns={others}"
        )
    return RecordSource(files, index, _Objects(fields), {"format": "JSON Lines"})


class _Objects(Decoder):
    """Objects of which only the fields that are read become Python's, each checked to be of its type."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = list(fields)
        msgspec: Any = import_msgspec(purpose=_PURPOSE)
        held = {field.name: (_python_type(field),) for field in fields if not field.mask_of and field.nulls != "masked"}
        lacking = {field.name: (_python_type(field) | None, None) for field in fields if field.nulls == "masked"}
        alone = {field.mask_of: (Any, None) for field in fields if field.mask_of and field.mask_of not in lacking}
        kinds: dict[str, Any] = {**held, **lacking, **alone}
        names = {f"field{number}": name for number, name in enumerate(kinds)}
        record = msgspec.defstruct(
            "Record", [(short, *kinds[name]) for short, name in names.items()], rename=names, kw_only=True, gc=False
        )
        self._names, self._nullable = list(kinds), [*lacking, *alone]
        self._decode: Callable[[Bytes], Any] = msgspec.json.Decoder(record).decode
        self._decode_whole: Callable[[Bytes], Any] = msgspec.json.decode
        self._astuple: Callable[[Any], tuple[Any, ...]] = msgspec.structs.astuple

    def __reduce__(self) -> tuple[Any, ...]:
        return _Objects, (self._fields,)

    def widened(self) -> "_Objects":
        """Returns the same with integers of 64 bits as they are stored."""
        return _Objects([field.widened() for field in self._fields])

    @property
    def sample_spec(self) -> Any:
        return {field.name: field.spec for field in self._fields}

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        try:
            records = [self._decode(payload) for payload in payloads]
        except (ValueError, RecursionError):  # errors of msgspec are ValueErrors
            records = [
                _decoded(self._decode, payload, where(row), lacking=self._lacking)
                for row, payload in enumerate(payloads)
            ]
        columns = dict(zip(self._names, zip(*map(self._astuple, records), strict=True), strict=True))
        is_valid = {name: np.array([_whole(value) is not None for value in columns[name]]) for name in self._nullable}
        for field in self._fields:
            if field.mask_of:
                out[field.name][:] = is_valid[field.mask_of]
            elif field.nulls == "masked":
                field.store_valid(columns[field.name], is_valid[field.name], out[field.name], where)
            else:
                field.store(columns[field.name], out[field.name], where)

    def _lacking(self, payload: Bytes) -> str:
        """Returns the field that a record lacks, of those that all records have to have; else nothing."""
        try:
            record = self._decode_whole(payload)
        except (ValueError, RecursionError):
            return ""
        names = [name for name in self._names if name not in self._nullable] if isinstance(record, dict) else []
        return next((name for name in names if _whole(record.get(name)) is None), "")


def _decoded(
    decode: Callable[[Bytes], Any], payload: Bytes, where: str, *, lacking: Callable[[Bytes], str] = lambda _: ""
) -> Any:
    try:
        return decode(payload)
    except (ValueError, RecursionError) as error:
        shown = f"{bytes(payload[:40])!r}{'…' if len(payload) > 40 else ''}"
        name = lacking(payload)
        ask = f"; where {name!r} may be null or missing, ask for {name + VALID!r} in columns= too" if name else ""
        raise RecordError(
            f"{where}: {shown} does not decode ({error}); mend the record, or leave a field out or declare its type "
            f"with columns={ask}"
        ) from error


def _whole(value: Any) -> Any:
    """Returns a value; None for a list with a null in it."""
    return None if isinstance(value, list) and _has_null(cast("list[Any]", value)) else value


def _has_null(values: Sequence[Any]) -> bool:
    return any(_whole(value) is None for value in values)


def _python_type(field: Field) -> Any:
    """Returns the type that msgspec demands of a field's values."""
    if not field.is_numeric:
        return str
    kind: Any = {"b": bool, "f": float}.get(np.dtype(field.wide).kind, int)
    inner: Any = kind | None if field.nulls == "masked" and field.depth else kind
    for level in range(field.depth):
        inner = list[inner | None] if field.nulls == "masked" and level else list[inner]
    return inner
