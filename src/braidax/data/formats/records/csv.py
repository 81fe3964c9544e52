"""CSV and TSV: a header, then a record a line, or several lines where quotes hold newlines."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from braidax.data.formats.records.fields import Columns, Field, Parsed, fields_of, readable, sampled_indices
from braidax.data.formats.records.index import Chunk, RecordIndex
from braidax.data.formats.records.lines import BOM, between, chunks, decoded, first_byte
from braidax.data.formats.records.records import Decoder, RecordSource
from braidax.data.formats.rows import Rows, Target
from braidax.data.formats.tables.columns import VALID
from braidax.data.leaves import Flat
from braidax.data.source import Indices
from braidax.data.storage.files import Bytes, Files, Joined
from braidax.errors import ArgumentError, FormatError, RecordError

_NEWLINE, _RETURN, _QUOTE = 10, 13, 34
_AT_ONCE = 256  # records from which on it is quicker to parse them at once
_MOST_MISSES = 8  # windows that were tried so in vain, after which it is not tried again


def open_csv(
    files: Files, *, columns: Columns | None = None, delimiter: str | None = None, cache: Path | None = None
) -> RecordSource:
    """Opens CSV or TSV files (RFC 4180): each begins with the same header; empty lines are no records.

    Columns of whole numbers are int32, of other numbers float32, all others text of varying size. An empty cell among
    numbers is null: where the records that are looked at hold one, a mask lies beside the column, `NAME.is_valid`. In
    CSV a field in double quotes may hold delimiters, newlines and, doubled, quotes. In TSV a quote is a letter as any
    other.

    **Arguments:** `files`: UTF-8. `columns`: to read, in order, or what each of them holds; see `Columns`. `delimiter`:
    one character; by default a tab for names that end in `.tsv`, else a comma. `cache`: as `RecordIndex.build`.

    **Raises:** `FormatError` for headers that differ, repeat a name or leave one out, and for quotes that RFC 4180 does
    not allow; `ArgumentError` for options that cannot work; `RecordError` for a record with too many or too few fields.
    """
    if delimiter is None:
        delimiter = "\t" if ".tsv" in files.names[0].rpartition("/")[2] else ","
    if len(delimiter) != 1 or ord(delimiter) > 127 or delimiter in '"\r\n':
        raise ArgumentError(f"delimiter={delimiter!r}: expected one ASCII character, no quote and no line end")
    style = _Style(delimiter)
    header = _header(files)
    names = _names(header, style, files.names[0])
    kind = f"csv-{ord(delimiter)}"
    index = RecordIndex.build(files, functools.partial(_scan, style=style, header=header), kind=kind, cache=cache)
    if not len(index):
        raise FormatError(
            f"{files.names[0]}: holds a header and 0 records in {len(files.names)} file(s); expected some"
        )
    ranges = index.ranges(sampled_indices(len(index)))
    payloads = files.read(ranges)

    def read(row: int) -> list[str]:
        where = f"{files.names[int(ranges.file[row])]}, the record at byte {int(ranges.offset[row]):,}"
        return style.split(payloads[row], len(names), lambda: where)

    rows = readable(read, range(len(payloads)))
    declared = dict(columns) if isinstance(columns, Mapping) else {}
    sampled: dict[str, list[Any]] = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        kind = _kind(declared.get(name))
        found = list(values) if kind == "text" else _parsed(values)
        sampled[name] = [None if value == "" else value for value in found] if kind == "numbers" else found
    fields = fields_of(sampled, columns, where=files.names[0], nulls="masked")
    masks = [field.mask_of for field in fields if field.mask_of and _kind(declared.get(field.mask_of)) != "numbers"]
    if texts := [name for name in masks if any(isinstance(value, str) for value in sampled[name])]:
        raise ArgumentError(
            f"columns={columns!r}: {texts[0]!r} of {files.names[0]} is text, of which an empty cell is a value; "
            f"expected masks of numbers alone: leave {texts[0] + VALID!r} out"
        )
    facts = {"format": "TSV" if delimiter == "\t" else "CSV"}
    return RecordSource(files, index, _Rows(fields, names, style), facts)


def _kind(declaration: Any) -> Literal["numbers", "text", "not told"]:
    """Returns what a column is declared to hold; what is no declaration, `fields_of` refuses."""
    if declaration is None:
        return "not told"
    dtype = getattr(declaration, "dtype", declaration)
    return "text" if dtype is str or getattr(dtype, "kind", "") in ("U", "O") else "numbers"


class _Style:
    """How fields are told apart."""

    def __init__(self, delimiter: str) -> None:
        self.delimiter = delimiter
        self.quotes = delimiter != "\t"

    def split(self, payload: Bytes, num_fields: int, where: Callable[[], str]) -> list[str]:
        """Returns the fields of a record."""
        fields = self.fields(payload, where)
        if len(fields) != num_fields:
            raise RecordError(
                f"{where()}: has {len(fields)} fields, expected {num_fields} as in the header; quote fields that hold "
                f"a {self.delimiter!r} or a newline, or mend the record"
            )
        return fields

    def fields(self, payload: Bytes, where: Callable[[], str]) -> list[str]:
        """Returns as many fields as a line has."""
        text = decoded(payload, where)
        return self._quoted(text, where) if self.quotes and '"' in text else text.split(self.delimiter)

    def _quoted(self, text: str, where: Callable[[], str]) -> list[str]:
        fields: list[str] = []
        at = 0
        while True:
            if text.startswith('"', at):
                end = text.find('"', at + 1)
                while text.startswith('""', end):
                    end = text.find('"', end + 2)
                if end < 0 or text[end + 1 : end + 2] not in ("", self.delimiter):
                    raise RecordError(
                        f"{where()}: field {len(fields)} has a quote inside quotes; expected it to be doubled: mend it"
                    )
                fields.append(text[at + 1 : end].replace('""', '"'))
                end += 1
            else:
                found = text.find(self.delimiter, at)
                end = len(text) if found < 0 else found
                fields.append(text[at:end])
            if end == len(text):
                return fields
            at = end + 1


class _Rows(Decoder):
    """Rows of a table of which some columns are read."""

    def __init__(self, fields: Sequence[Field], names: Sequence[str], style: _Style) -> None:
        self._fields = list(fields)
        self._columns = [names.index(field.mask_of or field.name) for field in fields]
        values = [field for field in fields if not field.mask_of]
        self._has_all = {field.mask_of for field in fields} <= {"", *(field.name for field in values)}
        self._names = list(names)
        self._num_fields = len(names)
        self._style = style
        self._num_misses = 0

    def widened(self) -> "_Rows":
        """Returns the same with integers of 64 bits as they are stored."""
        return _Rows([field.widened() for field in self._fields], self._names, self._style)

    @property
    def sample_spec(self) -> Any:
        return {field.name: field.spec for field in self._fields}

    def flat_values(self, leaf: str) -> Flat | None:
        """Returns what columns of text are made of, as `Flattened`."""
        is_text = any(field.name == leaf and not field.is_numeric for field in self._fields)
        return Flat("text", np.dtype(np.uint8)) if is_text else None

    def decode(self, payloads: Sequence[Bytes], indices: Indices, out: Any, where: Callable[[int], str]) -> None:
        if len(payloads) >= _AT_ONCE and self._num_misses < _MOST_MISSES and self._has_all:
            from braidax.data.formats.records.csv_windows import parsed_at_once  # not with `import braidax`

            style, held = self._style, [field for field in self._fields if not field.mask_of]
            pieces = [field.name for field in held if isinstance(out[field.name], Rows)]
            parsed = parsed_at_once(payloads, held, self._names, style.delimiter, style.quotes, pieces)
            if parsed is not None:
                self._store(dict(zip([field.name for field in held], parsed, strict=True)), out, where)
                return
            self._num_misses += 1
        rows = [
            self._style.split(payload, self._num_fields, lambda row=row: where(row))
            for row, payload in enumerate(payloads)
        ]
        found: dict[str, Parsed] = {}
        for field, column in zip(self._fields, self._columns, strict=True):
            values: list[Any] = [row[column] for row in rows]
            is_valid = np.ones(len(values), np.bool_)
            if field.mask_of or field.nulls == "masked":
                is_valid = np.array([value != "" for value in values])
                values = [value or "0" for value in values]  # which nobody looks at
            if field.is_numeric and not field.mask_of:
                values = _numbers(values, field, where)
            if not field.mask_of or field.mask_of not in found:
                found[field.mask_of or field.name] = Parsed(values, is_valid)
        self._store(found, out, where)

    def _store(self, found: Mapping[str, Parsed], out: Any, where: Callable[[int], str]) -> None:
        for field in self._fields:
            values, is_valid = found[field.mask_of or field.name]
            target: Target = out[field.name]
            if isinstance(target, Rows) and isinstance(values, Joined):
                target.place(*values)
            elif isinstance(target, Rows):
                target.place_each([text.encode() for text in values])
            elif field.mask_of:
                target[:] = is_valid
            elif field.nulls == "masked":
                field.store_valid(values, is_valid, target, where)
            else:
                field.store(values, target, where)


def _numbers(values: list[str], field: Field, where: Callable[[int], str]) -> list[Any]:
    number = {"f": _float, "b": _bool}.get(field.wide.kind, _int)
    try:
        return [number(value) for value in values]
    except ValueError as error:
        row = next(row for row, value in enumerate(values) if not _is(number, value))
        ask = "" if values[row] else f"ask for {field.name + VALID!r} in columns= too, "
        raise RecordError(
            f"{where(row)}: column {field.name!r} holds {values[row]!r}, expected {field.dtype} as in the records that "
            f"were looked at first; mend the record, {ask}leave the column out, or read it as text with "
            f"columns={{{field.name!r}: str, …}}"
        ) from error


def _int(text: str) -> int:
    if "_" in text:  # which Python allows
        raise ValueError(text)
    return int(text)


def _float(text: str) -> float:
    if "_" in text:
        raise ValueError(text)
    return float(text)


def _bool(text: str) -> bool:
    value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if value is None:
        raise ValueError(text)
    return value


def _is(number: Callable[[str], Any], text: str) -> bool:
    try:
        number(text)
    except ValueError:
        return False
    return True


def _parsed(values: Sequence[str]) -> list[Any]:
    """Returns a column's values as the numbers that they are, None for empty ones; else all as text."""
    filled = [value for value in values if value]
    for number in (_int, _float):
        if filled and all(_is(number, value) for value in filled):
            return [number(value) if value else None for value in values]
    return list(values)


def _header(files: Files) -> bytes:
    """Returns the header of the first file, without line end and byte order mark."""
    head, start = b"", 0
    with files.open(0) as file:
        for base, chunk in chunks(file):
            start = first_byte(chunk, files.names[0]) if base == 0 else start
            head += chunk.tobytes()
            at = head.find(b"\n", start)
            while at >= 0 and head.count(b'"', start, at) % 2:
                at = head.find(b"\n", at + 1)
            if at >= 0:
                return head[start:at].removesuffix(b"\r")
    return head[start:]


def _names(header: bytes, style: _Style, name: str) -> list[str]:
    columns = style.fields(header, lambda: f"{name}, the header")
    wrong = [column for column in columns if not column or columns.count(column) > 1]
    if wrong:
        raise FormatError(
            f"{name}: the first line is no header: {wrong[0]!r} is empty or stands there twice, in {columns[:8]}; "
            "expected a name for each column: write one as the first line"
        )
    return columns


def _scan(file: IO[bytes], name: str, *, style: _Style, header: bytes) -> Iterator[Chunk]:
    """Finds the records of a file that are not empty, except its header."""
    head = file.read(len(BOM) + len(header) + 1).removeprefix(BOM)
    file.seek(0)
    if head and (head[: len(header)] != header or head[len(header) : len(header) + 1] not in (b"", b"\r", b"\n")):
        raise FormatError(
            f"{name}: begins with {head[:80]!r}, expected the header {header[:80]!r} as in the first file; write the "
            "files with one header"
        )
    is_header = True
    for offsets, lengths in _scan_records(file, name, style):
        filled = lengths > 0
        filled[0] &= not is_header
        is_header = False
        yield offsets[filled], lengths[filled]


def _scan_records(file: IO[bytes], name: str, style: _Style) -> Iterator[Chunk]:
    """Finds all records: a newline ends one where the number of quotes before it is even."""
    tail, start, end, num_quotes = _NEWLINE, 0, 0, 0
    quotes = _Quotes(style, name)
    for base, chunk in chunks(file):
        if base == 0:
            start = first_byte(chunk, name)
        ends = np.flatnonzero(chunk == _NEWLINE)
        if style.quotes:
            found = np.flatnonzero(chunk == _QUOTE)
            quotes.check(chunk, base, start if base == 0 else -1, found, num_quotes)
            ends = ends[(np.searchsorted(found, ends) + num_quotes) % 2 == 0]
            num_quotes += len(found)
        if ends.size:
            yield between(chunk, base, tail, start, ends)
            start = base + int(ends[-1]) + 1
        tail = int(chunk[-1])
        end = base + len(chunk)
    if num_quotes % 2:
        raise FormatError(
            f"{name}: a quote is opened in the record at byte {start:,} and never closed; the file is truncated, or a "
            "quote is not doubled: mend it"
        )
    if end > start:
        yield np.array([start]), np.array([end - start - (tail == _RETURN)])


class _Quotes:
    """Checks that quotes stand where RFC 4180 has them, so that counting them tells where a record ends."""

    def __init__(self, style: _Style, name: str) -> None:
        self._delimiter = ord(style.delimiter)
        self._name = name
        self._before = _NEWLINE  # the byte before the chunk
        self._closing = -1  # where the chunk before ended with a closing quote, else -1

    def check(
        self, chunk: NDArray[np.uint8], base: int, start: int, quotes: NDArray[np.int64], num_quotes: int
    ) -> None:
        """Takes the next chunk; `start`: of the text in the first one. `quotes`: their places; `num_quotes`: before."""
        if self._closing >= 0 and chunk[0] not in (self._delimiter, _NEWLINE, _RETURN, _QUOTE):
            raise self._wrong(self._closing)
        opening = quotes[num_quotes % 2 :: 2]
        before = chunk[np.maximum(opening - 1, 0)]
        if opening.size and opening[0] == 0:
            before[0] = self._before
        allowed = (before == self._delimiter) | (before == _NEWLINE) | (before == _QUOTE) | (opening == start)
        if not allowed.all():
            raise self._wrong(base + int(opening[np.argmin(allowed)]))
        closing = quotes[1 - num_quotes % 2 :: 2]
        inside = closing[closing < len(chunk) - 1]
        after = chunk[inside + 1]
        allowed = (after == self._delimiter) | (after == _NEWLINE) | (after == _RETURN) | (after == _QUOTE)
        if not allowed.all():
            raise self._wrong(base + int(inside[np.argmin(allowed)]))
        self._closing = base + int(closing[-1]) if len(inside) < len(closing) else -1
        self._before = int(chunk[-1])

    def _wrong(self, place: int) -> FormatError:
        return FormatError(
            f"{self._name}: a quote at byte {place:,} is neither the border of a field nor doubled inside one (RFC "
            '4180), so it cannot be told where records end; write "" for a quote, and quotes around the field that '
            "holds it"
        )
