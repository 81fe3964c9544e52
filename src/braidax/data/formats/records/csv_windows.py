"""Many records of CSV parsed at once by pyarrow, where it is installed and what it reads is what Python would."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from braidax.data.formats.records.fields import Field, Parsed
from braidax.data.formats.tables.tables import text_of
from braidax.data.storage.files import Bytes, Joined
from braidax.errors import MissingExtra
from braidax.extras import import_pyarrow, import_pyarrow_csv

_WORDS = {word: [word, word.capitalize(), word.upper(), number] for word, number in (("true", "1"), ("false", "0"))}
_HEX = (b"0x", b"0X")  # which pyarrow takes for integers, and Python does not


def parsed_at_once(
    payloads: Sequence[Bytes],
    fields: Sequence[Field],
    names: Sequence[str],
    delimiter: str,
    quotes: bool,
    pieces: Collection[str] = (),
) -> list[Parsed] | None:
    """Parses records that are no empty lines.

    **Arguments:** `payloads`: the bytes of each. `fields`: to read. `names`: of all columns. `delimiter`. `quotes`:
    whether fields may be quoted. `pieces`: fields of text that are wanted as their bytes.

    **Returns:** the values of each field, as `Field.store` takes them, or `Joined` of UTF-8, and which are no empty
    cells; None where pyarrow is not there, or where a record needs a closer look: it may be wrong, or right in a way
    that pyarrow does not know.
    """
    data = b"\n".join([*payloads, b""])
    is_integer = any(field.is_numeric and field.wide.kind in "iu" for field in fields)
    if b"\r" in data or data.startswith(b"\xef\xbb\xbf") or (is_integer and any(prefix in data for prefix in _HEX)):
        return None
    try:
        pa, csv = import_pyarrow(purpose="parsing CSV"), import_pyarrow_csv(purpose="parsing CSV")
    except MissingExtra:
        return None
    try:
        str(data, "utf-8")  # of columns, too, that are not read
        kinds = {
            field.name: pa.from_numpy_dtype(field.wide) if field.is_numeric else pa.large_string() for field in fields
        }
        table = csv.read_csv(
            pa.BufferReader(data),
            read_options=csv.ReadOptions(column_names=list(names), use_threads=False, block_size=len(data) + 1),
            parse_options=csv.ParseOptions(
                delimiter=delimiter,
                quote_char='"' if quotes else False,
                newlines_in_values=quotes,
                ignore_empty_lines=False,
            ),
            convert_options=csv.ConvertOptions(
                check_utf8=False,
                column_types=kinds,
                include_columns=list(kinds),
                null_values=[""] if any(field.nulls == "masked" for field in fields) else [],
                strings_can_be_null=False,
                true_values=_WORDS["true"],
                false_values=_WORDS["false"],
            ),
        )
    except (pa.ArrowException, UnicodeDecodeError, TypeError):
        return None
    if table.num_rows != len(payloads):
        return None
    columns = [table.column(field.name) for field in fields]
    if any(column.null_count for field, column in zip(fields, columns, strict=True) if field.nulls != "masked"):
        return None
    return [_values(field, column, pieces) for field, column in zip(fields, columns, strict=True)]


def _values(field: Field, column: Any, pieces: Collection[str]) -> Parsed:
    if field.name in pieces:
        data, bounds = text_of(column.combine_chunks())
        return Parsed(Joined(data, bounds[:-1], np.diff(bounds)), np.ones(len(column), np.bool_))
    if not field.is_numeric:
        return Parsed(column.to_pylist(), np.ones(len(column), np.bool_))
    filled = column.fill_null(False if field.wide.kind == "b" else 0) if column.null_count else column
    return Parsed(np.asarray(filled.to_numpy()), np.asarray(column.is_valid().to_numpy()))
