"""Parts of a whole, divided evenly among ranks: arrays and tables, by what they can do and not by what they are.

No library is imported here: whoever has a table has loaded its library.
"""

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from braidax.errors import ArgumentError

_EXPECTED = "NumPy arrays, tables or record batches of pyarrow, or data frames of Polars"


def divided(values: Sequence[Any], size: int) -> list[Any]:
    """Returns the rows of all values, one behind the other, in `size` parts whose lengths differ by at most one.

    What lies in one value alone is a slice of it, but for tables of Arrow: whoever pickles a slice of these sends all
    that it is a slice of, so it is copied.

    **Raises:** `ArgumentError` naming what has no rows, or is not like the first.
    """
    lengths = [_num_rows(value, number) for number, value in enumerate(values)]
    for number, value in enumerate(values):
        if (kind := _kind(value)) != (first := _kind(values[0])):
            raise ArgumentError(
                f"values[{number}] is {kind}, values[0] {first}: expected all alike, so that their rows can be divided "
                f"among the {size} ranks; or give one value for each rank"
            )
    ends = np.cumsum(lengths).tolist()
    borders = [_border(ends[-1], size, number) for number in range(size + 1)]
    parts: list[Any] = []
    for begin, end in itertools.pairwise(borders):
        pieces: list[Any] = []
        for value, length, stop in zip(values, lengths, ends, strict=True):
            first, last = max(begin, stop - length), min(end, stop)
            if first < last:
                pieces.append(_cut(value, first - (stop - length), last - first))
        parts.append(_joined(pieces or [_cut(values[0], 0, 0)]))
    return parts


def _border(num_rows: int, size: int, number: int) -> int:
    """Returns where a part begins; the first ones have the rows that are left over."""
    return num_rows // size * number + min(number, num_rows % size)


def _num_rows(value: Any, number: int) -> int:
    table: Any = value
    if isinstance(value, np.ndarray) and value.ndim:
        return len(value)
    if _is_arrow(table):
        return int(table.num_rows)
    if _is_polars(table):
        return int(table.height)
    raise ArgumentError(
        f"values[{number}] is a {type(value).__module__}.{type(value).__qualname__}, whose rows cannot be divided: "
        f"expected {_EXPECTED}; or give one value for each rank"
    )


def _kind(value: Any) -> str:
    """Returns what must be the same of all values."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with rows of shape {value.shape[1:]}"
    schema = value.schema
    columns = zip(schema.names, schema.types, strict=True) if _is_arrow(value) else schema.items()
    named = ", ".join(f"{name}: {kind}" for name, kind in columns)
    return f"a {type(value).__module__.partition('.')[0]}.{type(value).__name__} of {{{named}}}"


def _is_arrow(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("num_rows", "slice", "schema", "get_total_buffer_size"))


def _is_polars(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("height", "slice", "schema", "vstack"))


def _cut(value: Any, begin: int, num_rows: int) -> Any:
    return value[begin : begin + num_rows] if isinstance(value, np.ndarray) else value.slice(begin, num_rows)


def _joined(pieces: list[Any]) -> Any:
    if isinstance(pieces[0], np.ndarray):
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if _is_polars(pieces[0]):
        return functools.reduce(lambda above, below: above.vstack(below), pieces)
    return _copied(pieces)


def _copied(pieces: list[Any]) -> Any:
    """Returns tables or record batches as one that holds its own rows and no others."""
    arrow = sys.modules["pyarrow"]
    schema = pieces[0].schema
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, schema) as stream:
        for piece in pieces:
            stream.write(piece)
    table = arrow.ipc.open_stream(sink.getvalue()).read_all()
    if not hasattr(pieces[0], "to_batches"):  # a record batch
        batches = table.to_batches()
        return arrow.concat_batches(batches) if batches else arrow.RecordBatch.from_pylist([], schema=schema)
    return table
