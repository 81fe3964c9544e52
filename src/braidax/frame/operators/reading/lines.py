"""CSV and NDJSON in parts of the bytes: a rank reads the lines that begin in its even part of a file.

A newline within quotes ends no line. Whether a place of a CSV is within quotes is told by how many quotes there are
before it: each rank counts those of its part, and the numbers of all tell it where the first line of its part begins.
Polars itself splits files by the same parity, so that the lines are the same ("Speculative Distributed CSV Data
Parsing for Big Data Analytics", Ge et al. 2019, has the two passes).
"""

import glob
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidax.errors import ReadError
from braidax.frame.moving.ranks import Ranks
from braidax.frame.plan.building import select_columns
from braidax.frame.plan.expressions import kind_of
from braidax.frame.plan.nodes import Node
from braidax.frame.plan.supplying import Reading, first_rows, schema_of, wanted
from braidax.frame.polars import Schema, pl
from braidax.frame.running import Runner, Table

_MANY_BYTES = 4 << 20  # of a file, below which its rows are soon counted
_BLOCK_BYTES = 16 << 20  # that are parsed at once
_SEARCHED_BYTES = 64 << 10  # for the end of a line, at once
_HEADER_BYTES = 1 << 20  # at most
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"x\x01", b"x^", b"x\x9c", b"x\xda")  # gzip, zstd, zlib
_MARKED = (b"\xef\xbb\xbf", b"\n", b"\r")  # how a file begins that has something in front of its header
_PLAIN_SCAN = {
    "row_index": None,
    "pre_slice": None,
    "include_file_paths": None,
    "column_mapping": None,
    "default_values": None,
    "deletion_files": None,
    "projection": None,
    "schema": None,
    "missing_columns_policy": "Raise",
    "extra_columns_policy": "Raise",
}
_PLAIN_CSV = {
    "skip_lines": 0,
    "skip_rows": 0,
    "skip_rows_after_header": 0,
    "n_rows": None,
    "row_index": None,
    "projection": None,
    "columns": None,
    "dtype_overwrite": None,
    "fields_to_cast": [],
    "ignore_errors": False,
}
_PLAIN_PARSING = {
    "comment_prefix": None,
    "encoding": "Utf8",
    "eol_char": ord("\n"),
    "truncate_ragged_lines": False,
    "try_parse_dates": False,
}

Parse = Callable[[bytes], "pl.LazyFrame"]
"""Returns the rows of some lines."""


def lines_of(node: Node) -> tuple[int, int] | None:
    """Returns from where to where the lines of a scan's file lie; None where lines cannot be read by themselves.

    That is so for files that are small or packed, for several of them, and for options that are about the whole file.
    """
    path = _path(node)
    if path is None:
        return None
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size < _MANY_BYTES:
            return None
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except (OSError, ValueError):  # which Polars then says
        return None
    if head.startswith((*_PACKED, *_MARKED)):
        return None
    begin = _header_end(node, head) if kind_of(node.fields["scan_type"]) == "Csv" else 0
    return None if begin is None else (begin, status.st_size)


def read_lines(runner: Runner, node: Node, lines: tuple[int, int]) -> Table:
    """Reads the lines that begin in a rank's even part of a file. **Arguments:** `lines`: as `lines_of` gives."""
    path, schema = _path(node), schema_of(node)
    assert path is not None
    quote = _quote(node)
    begin, end = part_of(runner.ranks, path, lines, quote)
    reading = LineReading(schema, Lines(path, begin, end, quote), _parser(node, schema))
    table = runner.read(reading, schema)
    return runner.local(select_columns(table.node, list(schema)), table)  # computed where it is read twice


def part_of(ranks: Ranks, path: Path, lines: tuple[int, int], quote: bytes) -> tuple[int, int]:
    """Returns from where to where this rank's lines lie. Each rank reads its even part of the bytes."""
    first, last = lines
    begin, end = (first + (last - first) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
    part = Lines(path, begin, end, quote)
    inside = int(ranks.all([part.num_quotes()])[: ranks.rank].sum()) % 2 == 1
    own = first if begin == first < end else part.first_line(inside=inside)
    begins = [*ranks.all([own])[:, 0].astype(int).tolist(), last]
    following = next(place for place in begins[ranks.rank + 1 :] if place >= 0)
    return (own, following) if own >= 0 else (following, following)


@dataclass(frozen=True)
class Lines:
    """Bytes of a file. **Fields:** `begin`, `end`: where they lie. `quote`: a byte, or none."""

    path: Path
    begin: int
    end: int
    quote: bytes

    def num_quotes(self) -> int:
        """Returns how many quotes there are."""
        return (
            sum(data.count(self.quote) for _, data in self._pieces(self.begin, self.end, _BLOCK_BYTES))
            if self.quote
            else 0
        )

    def first_line(self, *, inside: bool) -> int:
        """Returns where the first line begins, -1 if none does. **Arguments:** `inside`: whether a quote is open."""
        if self.begin < self.end and not inside and self._read(self.begin - 1, 1) == b"\n":
            return self.begin
        for offset, data in self._pieces(self.begin, self.end - 1, _SEARCHED_BYTES):
            at = 0
            while at < len(data):
                if inside:
                    at = data.find(self.quote, at) + 1 or len(data) + 1
                    inside = at > len(data)
                    continue
                newline = data.find(b"\n", at)
                stop = newline if newline >= 0 else len(data)
                inside = _num_in(data, self.quote, at, stop) % 2 == 1
                if newline >= 0 and not inside:
                    return offset + newline + 1
                at = stop
        return -1

    def blocks(self) -> Iterator[bytes]:
        """Yields the lines, as many at once as fit into a block."""
        at, rest = self.begin, b""
        while at < self.end:
            data = self._read(at, min(max(_BLOCK_BYTES, len(rest)), self.end - at))
            at += len(data)
            data = rest + data
            end = lines_end(data, self.quote) if at < self.end else len(data)
            if end:
                yield data[:end]
            rest = data[end:]

    def _pieces(self, begin: int, end: int, most_bytes: int) -> Iterator[tuple[int, bytes]]:
        while begin < end:
            data = self._read(begin, min(most_bytes, end - begin))
            yield begin, data
            begin += len(data)

    def _read(self, begin: int, num_bytes: int) -> bytes:
        with self.path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), num_bytes, begin)
        if not data:
            raise ReadError(
                f"{self.path} ends at byte {begin}, before byte {self.end} where it ended when the plan began: let "
                "nobody change a file while it is read"
            )
        return data


def lines_end(data: bytes, quote: bytes) -> int:
    """Returns where the last whole line ends, 0 if none does. **Arguments:** `data`: begins with a line."""
    at, inside = len(data), _num_in(data, quote, 0, len(data)) % 2 == 1
    while True:
        if inside:
            at = data.rfind(quote, 0, at)
        newline = data.rfind(b"\n", 0, at)
        if newline < 0:
            return 0
        inside = _num_in(data, quote, newline, at) % 2 == 1
        if not inside:
            return newline + 1
        at = newline


class LineReading(Reading):
    """What a piece reads of a file: lines, which are parsed block by block.

    **Arguments:** `schema`: of the rows. `lines`: the rank's. `parse`: what gives their rows.
    """

    is_streamed = True

    def __init__(self, schema: Schema, lines: Lines, parse: Parse) -> None:
        super().__init__(pl.DataFrame(schema=schema))
        self._lines, self._parse = lines, parse

    @property
    def num_bytes(self) -> float:
        """Returns how many bytes are read."""
        return float(self._lines.end - self._lines.begin)

    def whole(self) -> "pl.DataFrame":
        """Returns all rows."""
        return pl.concat([self.frame, *self.batches()])

    def batches(self) -> Iterator["pl.DataFrame"]:
        """Yields all rows."""
        return self(None, None, None, None)

    def __call__(
        self, columns: list[str] | None, predicate: "pl.Expr | None", num_rows: int | None, batch_size: int | None
    ) -> Iterator["pl.DataFrame"]:
        """Is the scan's function. See `polars.io.plugins.register_io_source`."""
        del batch_size
        yield self.frame if columns is None else self.frame.select(columns)
        if num_rows is not None:
            for frame in first_rows((self._parse(data).collect() for data in self._lines.blocks()), num_rows):
                yield wanted(frame, columns, predicate)
            return
        for data in self._lines.blocks():
            lazy = self._parse(data)
            lazy = lazy if predicate is None else lazy.filter(predicate)
            yield (lazy if columns is None else lazy.select(columns)).collect()


def _path(node: Node) -> Path | None:
    """Returns the file of a scan whose lines mean the same by themselves; None for any other scan."""
    fields = node.fields
    kind, sources, args = kind_of(fields["scan_type"]), fields["sources"], fields["unified_scan_args"]
    if kind not in ("Csv", "NDJson") or kind_of(sources) != "Paths" or len(sources["Paths"]) != 1:
        return None
    path = sources["Paths"][0]["inner"]
    if not isinstance(path, str) or "://" in path or (args["glob"] and glob.has_magic(path)):
        return None
    options = fields["scan_type"][kind]["options"]
    plain = _has(args, _PLAIN_SCAN) and not args["hive_options"]["enabled"] and not options["ignore_errors"]
    if kind == "Csv":
        parsing = options["parse_options"]
        plain = plain and _has(options, _PLAIN_CSV) and _has(parsing, _PLAIN_PARSING)
        plain = plain and all(map(_is_mark, (parsing["separator"], parsing["quote_char"] or ord('"'))))
    return Path(path) if plain else None


def _is_mark(byte: int) -> bool:
    """Returns whether a byte is in no name of a column of ours, and ends no line."""
    return byte < 128 and not chr(byte).isalnum() and chr(byte) not in "\r\n"


def _has(options: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(options[name] == value for name, value in wanted.items())


def _quote(node: Node) -> bytes:
    if kind_of(node.fields["scan_type"]) != "Csv":
        return b""
    quote = node.fields["scan_type"]["Csv"]["options"]["parse_options"]["quote_char"]
    return b"" if quote is None else bytes([quote])


def _header_end(node: Node, head: bytes) -> int | None:
    """Returns where the first row begins; None where the columns are not those of the first line, in its order."""
    options = node.fields["scan_type"]["Csv"]["options"]
    end = _first_end(head, _quote(node))
    if end is None:
        return None
    if options["schema"] is not None:
        names, wanted = _names(options, head[:end]), list(schema_of(node))
        if len(names) != len(wanted):
            return None
        names = options["column_names_overwrite"] or names
        if options["has_header"] and names != wanted:
            return None
    return end if options["has_header"] else 0


def _first_end(head: bytes, quote: bytes) -> int | None:
    """Returns where the first line ends; None if it does not."""
    at = -1
    while (at := head.find(b"\n", at + 1)) >= 0:
        if _num_in(head, quote, 0, at) % 2 == 0:
            return at + 1
    return None


def _names(options: Mapping[str, Any], line: bytes) -> list[str]:
    """Returns the names of the columns that a line of a CSV has."""
    scanned = pl.scan_csv(line, infer_schema=False, has_header=options["has_header"], **_parsing(options))
    return scanned.collect_schema().names()


def _parsing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how fields are told apart."""
    parsing = options["parse_options"]
    quote = parsing["quote_char"]
    return {"separator": chr(parsing["separator"]), "quote_char": None if quote is None else chr(quote)}


def _parser(node: Node, schema: Schema) -> Parse:
    """Returns what parses lines as a scan does, for columns whose dtypes are known."""
    kind = kind_of(node.fields["scan_type"])
    options = node.fields["scan_type"][kind]["options"]
    if kind == "NDJson":
        return lambda data: pl.scan_ndjson(data, schema=schema)
    short = {name: f"c{i}" for i, name in enumerate(schema)}  # in a header that needs no quotes
    dtypes = {short[name]: dtype for name, dtype in schema.items()}
    fields: dict[str, Any] = {
        **_parsing(options),
        "null_values": _null_values(options["parse_options"]["null_values"], short),
        "empty_string_is_null": options["parse_options"]["missing_is_null"],
        "decimal_comma": options["parse_options"]["decimal_comma"],
    }
    header = (fields["separator"].join(dtypes) + "\n").encode()
    names = [pl.col(one).alias(name) for name, one in short.items()]
    return lambda data: pl.scan_csv(header + data, schema=dtypes, **fields).select(names)


def _null_values(written: Any, short: Mapping[str, str]) -> Any:
    """Returns what is null, as a scan takes it."""
    if written is None:
        return None
    ((kind, values),) = written.items()
    return {short[name]: value for name, value in values if name in short} if kind == "Named" else values


def _num_in(data: bytes, quote: bytes, begin: int, end: int) -> int:
    return data.count(quote, begin, end) if quote else 0


__all__ = ["LineReading", "Lines", "lines_end", "lines_of", "part_of", "read_lines"]
