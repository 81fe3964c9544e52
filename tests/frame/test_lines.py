"""CSV and NDJSON that ranks read in parts of the bytes: the rows are what one process reads, whatever the bytes are."""

import json
import random
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import hypothesis
import polars as pl
import pytest
from hypothesis import strategies
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.comm import Communicator
from braidax.errors import ReadError
from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.reading import lines
from braidax.frame.operators.reading.lines import Lines, lines_end, lines_of, part_of
from braidax.frame.plan.nodes import read
from braidax.gang import LocalGang
from tests.support.comm.ranks import in_turns, outcomes
from tests.support.frame.queries.query import Query
from tests.support.frame.running import Asked, asking, united
from tests.support.frame.tables import Shape
from tests.support.frame.worlds import Worlds

pytestmark = [
    pytest.mark.usefixtures("shared", "by_lines"),
    # Ranks are threads, and hypothesis takes what any thread of the process draws for a strategy.
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
]


@pytest.fixture
def by_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks read even tiny files by lines, a few bytes at once."""
    monkeypatch.setattr(lines, "_MANY_BYTES", 1)
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 7)
    monkeypatch.setattr(lines, "_SEARCHED_BYTES", 5)


@dataclass(frozen=True)
class Text:
    """A file, and how it is scanned."""

    data: bytes
    options: tuple[tuple[str, Any], ...]
    folder: Path

    @property
    def shape(self) -> Shape:
        return Shape(repr(self), 0)

    @cached_property
    def csv(self) -> pl.LazyFrame:
        path = self.folder / "table.csv"
        path.write_bytes(self.data)
        return pl.scan_csv(path, **dict(self.options))

    @cached_property
    def ndjson(self) -> pl.LazyFrame:
        path = self.folder / "table.ndjson"
        path.write_bytes(self.data)
        return pl.scan_ndjson(path, **dict(self.options))


FIELDS = (
    *("", "1", "-7", "2.5", "a", "日本🙂", '""', '"a,b"', '"a\nb"', '"\n"', '"\r\n"', '"a""b"', '"""\n"""', "x" * 40),
    f'"{"é" * 9}\n{"y" * 50}"',
)
LAYOUTS = strategies.tuples(
    strategies.lists(strategies.lists(strategies.sampled_from(FIELDS), min_size=3, max_size=3), max_size=12),
    strategies.sampled_from(["\n", "\r\n"]),
    strategies.booleans(),
    strategies.booleans(),
)


@hypothesis.settings(max_examples=20)
@hypothesis.given(layout=LAYOUTS, size=strategies.integers(1, 4), inferred=strategies.sampled_from([0, 2, 100]))
def test_drawn_csv(
    layout: tuple[list[list[str]], str, bool, bool],
    size: int,
    inferred: int,
    worlds: Worlds,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rows, newline, ends, header = layout
    written = [["n", '"a ""name"""', "z"]] * header + rows
    text = newline.join(map(",".join, written)) + newline * (ends and bool(written))
    options = (("has_header", header), ("infer_schema_length", inferred))
    table = Text(text.encode(), options, tmp_path_factory.mktemp("csv"))
    Asked.of(Query("scan_csv", lambda tables: tables.csv), table).on_ranks(size, worlds)  # pyright: ignore


VALUES = (None, 1, -2, "a\nb", '"', "日本🙂", "", 'x,"' * 20)


@hypothesis.settings(max_examples=10)
@hypothesis.given(
    rows=strategies.lists(strategies.tuples(strategies.sampled_from(VALUES[:3]), strategies.sampled_from(VALUES[3:]))),
    newline=strategies.sampled_from(["\n", "\r\n", "\n\n"]),
    ends=strategies.booleans(),
    size=strategies.integers(1, 4),
)
def test_drawn_ndjson(
    rows: list[Any], newline: str, ends: bool, size: int, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory
) -> None:
    written = [
        json.dumps({"n": number, "text": text, "in": [{"a": number}]}, ensure_ascii=False) for number, text in rows
    ]
    text = newline.join(written) + newline * ends
    table = Text(text.encode(), (), tmp_path_factory.mktemp("ndjson"))
    Asked.of(Query("scan_ndjson", lambda tables: tables.ndjson), table).on_ranks(size, worlds)  # pyright: ignore


def expected_parts(data: bytes, size: int, quote: bytes) -> list[bytes]:
    """Returns the lines that begin in each even part of some bytes."""
    begins, inside = [0] if data else [], False
    for at, byte in enumerate(data):
        inside ^= bytes([byte]) == quote
        if byte == ord("\n") and not inside and at + 1 < len(data):
            begins.append(at + 1)
    parts = [b""] * size
    for begin, end in zip(begins, [*begins[1:], len(data)], strict=False):
        rank = next(rank for rank in range(size) if begin < len(data) * (rank + 1) // size)
        parts[rank] += data[begin:end]
    return parts


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    data=strategies.lists(strategies.sampled_from([b"a", b"\n", b'"', b"\r\n", b"long" * 9, "é".encode()])).map(
        b"".join
    ),
    size=strategies.integers(1, 4),
    quote=strategies.sampled_from([b'"', b""]),
)
def test_each_line_has_one_rank(
    data: bytes, size: int, quote: bytes, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(data)

    def part(comm: Communicator) -> list[bytes]:
        begin, end = part_of(Ranks(comm), path, (0, len(data)), quote)
        return list(Lines(path, begin, end, quote).blocks())

    found = worlds.run(size, part)
    assert [b"".join(blocks) for blocks in found] == expected_parts(data, size, quote)
    for blocks in found:  # each of whole lines
        assert all(lines_end(block, quote) == len(block) for block in blocks[:-1])


def test_a_giant_line_goes_to_the_rank_where_it_begins(tmp_path: Path, worlds: Worlds) -> None:
    path = tmp_path / "table.csv"
    texts = ["a", "b", "\n" + 'x\n"' * 3000, "c", "d"]
    pl.DataFrame({"n": range(5), "text": texts}).write_csv(path)
    found = worlds.run(4, lambda comm: bf.collect_partition(pl.scan_csv(path), comm))
    assert [part.height for part in found] == [3, 0, 0, 2]
    assert_frame_equal(pl.concat(found), pl.scan_csv(path).collect())


CSV = 'n,"a, name",z\n1,"x\ny",2.5\n,NA,-\n3,"","é"\n-4,q,1\n'
READ_BY_LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "as it is": (CSV, {}),
    "all text": (CSV, {"infer_schema": False}),
    "a little inferred": (CSV, {"infer_schema_length": 1, "schema_overrides": {"z": pl.String}}),
    "overrides": (CSV, {"schema_overrides": {"n": pl.Int8, "z": pl.Categorical}}),
    "a schema": (CSV, {"schema": {"n": pl.Int16, "a, name": pl.String, "z": pl.String}}),
    "new names": (CSV, {"new_columns": ["b", "c", "d"]}),
    "other names": (CSV, {"with_column_names": lambda names: [f"{name}!" for name in names]}),
    "a value for null": (CSV, {"null_values": "NA"}),
    "values for null": (CSV, {"null_values": ["NA", "-"]}),
    "values for null by name": (CSV, {"null_values": {"z": "-", "a, name": "q"}}),
    "empty text": (CSV, {"empty_string_is_null": False}),
    "no header": (CSV, {"has_header": False}),
    "no header but a schema": (
        CSV,
        {"has_header": False, "schema": {"a": pl.String, "b": pl.String, "c": pl.String}},
    ),
    "other separators": (CSV.replace(",", ";"), {"separator": ";"}),
    "other quotes": (CSV.replace('"', "'"), {"quote_char": "'"}),
    "no quotes": ('n,a\n1,"x\n2,y\n3,"\n', {"quote_char": None}),
    "commas in numbers": ("n;x\n1;2,5\n3;4,25\n", {"separator": ";", "decimal_comma": True}),
    "times": ("at\n2024-01-01\n2024-02-03\n", {"schema_overrides": {"at": pl.Date}}),
    "short lines": ("a,b\n1,2\n3\n,\n4,5\n", {}),
    "empty lines": ("a\n1\n\n\n2\n\n", {}),
    "a header alone": ("a,b\n", {}),
    "a header of two lines": ('n,"a\nb"\n1,"x\n"\n2,y\n', {}),
    "tabs": ("n\ta\n1\tx\n2\ty\n", {"separator": "\t", "quote_char": "|"}),
    "one column of text": ('a\n"x\ny"\nz', {"low_memory": True}),
}


@pytest.mark.parametrize(("name", "sizes"), in_turns(READ_BY_LINES, [(1, 3), (2, 4)], every=2))
def test_what_is_read_by_lines(name: str, sizes: tuple[int, int], tmp_path: Path, worlds: Worlds) -> None:
    text, options = READ_BY_LINES[name]
    table = Text(text.encode(), tuple(options.items()), tmp_path)
    assert lines_of(read(table.csv)[0]) is not None
    asked = Asked.of(Query(name, lambda tables: tables.csv), table)  # pyright: ignore
    for size in sizes:
        asked.on_ranks(size, worlds)


NOT_BY_LINES: dict[str, tuple[str | bytes, dict[str, Any]]] = {
    "a row index": (CSV, {"row_index_name": "i"}),
    "n_rows": (CSV, {"n_rows": 3}),
    "comments": ("#x\n" + CSV, {"comment_prefix": "#"}),
    "rows before": ("x,y,z\n" + CSV, {"skip_rows": 1}),
    "lines before": ('"\n' + CSV, {"skip_lines": 1}),
    "rows behind the header": (CSV, {"skip_rows_after_header": 1}),
    "paths": (CSV, {"include_file_paths": "path"}),
    "dates that are found": ("at,n\n2024-01-01,1\n2024-02-03,2\n", {"try_parse_dates": True}),
    "another end of lines": ("a;1\nb;2\n".replace("\n", "|"), {"eol_char": "|", "separator": ";", "has_header": False}),
    "lossy text": (CSV, {"encoding": "utf8-lossy"}),
    "errors as nulls": ("a\n1\nx\n3\n", {"ignore_errors": True, "schema_overrides": {"a": pl.Int64}}),
    "long lines cut": ("a,b\n1,2\n3,4,5\n", {"truncate_ragged_lines": True}),
    "a schema in another order": (
        CSV,
        {"schema": {"z": pl.String, "n": pl.String, "a, name": pl.String}},
    ),
    "a schema of fewer columns": (CSV, {"schema": {"n": pl.Int64, "z": pl.String}, "extra_columns": "ignore"}),
    "a byte order mark": (b"\xef\xbb\xbf" + CSV.encode(), {}),
    "empty lines before": ("\n\n" + CSV, {}),
    "a letter between fields": ("ax1\nbx2\n", {"separator": "x"}),
    "a letter for quotes": ("a,b\nc1,2c,3\n", {"quote_char": "c"}),
    "a header without an end": ("a,b", {}),
}


@pytest.mark.parametrize("name", NOT_BY_LINES)
def test_what_is_not_read_by_lines(name: str, tmp_path: Path, worlds: Worlds) -> None:
    text, options = NOT_BY_LINES[name]
    table = Text(text.encode() if isinstance(text, str) else text, tuple(options.items()), tmp_path)
    assert lines_of(read(table.csv)[0]) is None
    Asked.of(Query(name, lambda tables: tables.csv), table).on_ranks(3, worlds)  # pyright: ignore


@pytest.mark.parametrize("compression", ["gzip", "zlib", "zstd"])
def test_packed_files_are_not_read_by_lines(compression: Any, tmp_path: Path, worlds: Worlds) -> None:
    path = tmp_path / "table.csv"
    if compression == "zlib":
        path.write_bytes(zlib.compress(CSV.encode()))
    else:
        pl.DataFrame({"n": range(99)}).lazy().sink_csv(path, compression=compression, check_extension=False)
    lazy = pl.scan_csv(path)
    assert lines_of(read(lazy)[0]) is None
    assert_frame_equal(pl.concat(worlds.run(2, lambda comm: bf.collect_partition(lazy, comm))), lazy.collect())


def test_several_files_or_small_ones_are_not_read_by_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(CSV)
    assert lines_of(read(pl.scan_csv(tmp_path / "*.csv"))[0]) is None
    assert lines_of(read(pl.scan_csv([tmp_path / "a.csv", tmp_path / "b.csv"]))[0]) is None
    assert lines_of(read(pl.scan_csv(CSV.encode()))[0]) is None
    one = read(pl.scan_csv(tmp_path / "a.csv"))[0]
    assert lines_of(one) == (CSV.index("1,"), len(CSV.encode()))
    monkeypatch.setattr(lines, "_MANY_BYTES", 1 << 20)
    assert lines_of(one) is None


BROKEN = {
    "a field that is no number": (b"a,b\n" + b"1,2\n" * 9 + b"x,3\n" + b"4,5\n" * 3, {"infer_schema_length": 2}),
    "a line of more fields": (b"a,b\n" + b"1,2\n" * 9 + b"3,4,5\n", {}),
    "text that is no UTF-8": (b"a,b\n" + b"1,t\n" * 9 + b"3,\xff\n", {"infer_schema_length": 2}),
    "a number that is too large": (b"a,b\n" + b"1,2\n" * 9 + b"300,4\n", {"schema_overrides": {"a": pl.Int8}}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_parse_is_told_as_polars_tells_it(name: str, tmp_path: Path, worlds: Worlds) -> None:
    data, options = BROKEN[name]
    table = Text(data, tuple(options.items()), tmp_path)
    with pytest.raises(pl.exceptions.ComputeError) as caught:
        table.csv.collect()
    words = str(caught.value).split("\n")[0][:40]

    for lazy in (table.csv, table.csv.sort("a")):
        error = united(outcomes(3, asking(lazy)))
        assert isinstance(error, pl.exceptions.ComputeError)
        assert words in str(error)


def test_what_is_no_json_is_told_as_polars_tells_it(tmp_path: Path, worlds: Worlds) -> None:
    table = Text(b'{"a": 1}\n' * 9 + b'{"a": \n', (("schema", {"a": pl.Int64}),), tmp_path)
    Asked.of(Query("broken", lambda tables: tables.ndjson), table).on_ranks(3, worlds)  # pyright: ignore


def test_fields_that_only_later_lines_have(tmp_path: Path, worlds: Worlds) -> None:
    late = [{"a": 1}] * 9 + [{"b": 2, "a": 3}, {"a": None}, {}]
    data = "\n".join(map(json.dumps, late)).encode()
    for options in ((("infer_schema_length", 3),), (), (("schema_overrides", {"a": pl.Int8}),)):
        table = Text(data, options, tmp_path)
        assert lines_of(read(table.ndjson)[0]) is not None
        Asked.of(Query("late", lambda tables: tables.ndjson), table).on_ranks(3, worlds)  # pyright: ignore


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"1\n2\n")
    with pytest.raises(ReadError, match=r"table.csv ends at byte 4, before byte 9.*let nobody change"):
        list(Lines(path, 0, 9, b"").blocks())


ONE = {
    "csv": lambda t, **options: pl.scan_csv(t.files["csv"].parent / "table-2.csv", infer_schema_length=None, **options),
    "ndjson": lambda t: pl.scan_ndjson(t.files["ndjson"].parent / "table-2.ndjson", infer_schema_length=None),
}
c = pl.col
PLANS: dict[str, Any] = {
    "rows": lambda scan: scan,
    "some columns": lambda scan: scan.select("g", "id"),
    "a filter": lambda scan: scan.filter(c("id") > 30, c("g").is_not_null()).select("id"),
    "len": lambda scan: scan.select(pl.len()),
    "with_row_index": lambda scan: scan.filter(c("b")).with_row_index(),
    "a slice": lambda scan: scan.slice(3, 7),
    "the first rows": lambda scan: scan.head(4),
    "the last rows": lambda scan: scan.tail(6),
    "sums": lambda scan: scan.select(c("i", "s", "h").sum(), n=c("g").n_unique()),
    "group_by in order": lambda scan: scan.group_by("g", maintain_order=True).agg("id"),
    "sort": lambda scan: scan.sort("i", "id", descending=True),
    "read twice": lambda scan: scan.join(scan.select("id", h2="h"), on="id", how="left", maintain_order="left"),
    "a window": lambda scan: scan.select("id", m=c("i").max().over("g"), p=c("id").shift()),
    "concat": lambda scan: pl.concat([scan.select("id"), scan.select("id").head(4)]),
}


@pytest.mark.parametrize(("plan", "suffix"), in_turns(PLANS, ONE, every=2))
def test_plans_of_one_file(
    suffix: str, plan: str, tables: Any, worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 500)  # several lines at once, elsewhere here not one
    for shape, sizes in (("usual", (2, 3)), ("empty", (2,)), ("tiny", (3,))):
        asked = Asked.of(Query(plan, lambda t: PLANS[plan](ONE[suffix](t))), tables(shape))
        for size in sizes:
            asked.on_ranks(size, worlds)


def test_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 1 << 16)
    path = tmp_path / "table.csv"
    table = pl.DataFrame({"k": [i * 7919 % 5000 for i in range(20_000)], "s": [f"{i}\n" for i in range(20_000)]})
    table.write_csv(path)
    memory = bf.Memory(limit_bytes=32 << 20)
    lazy = pl.scan_csv(path).sort("k", "s")
    found = outcomes(2, lambda comm: bf.collect_partition(lazy, comm, memory=memory))
    assert_frame_equal(pl.concat(found), lazy.collect())


def bytes_read(comm: Communicator) -> int:
    """Returns how many bytes this process has read."""
    del comm
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("suffix", ["csv", "ndjson"])
def test_each_rank_reads_its_part_of_the_bytes(suffix: str, gang: LocalGang, tmp_path: Path) -> None:
    path = tmp_path / f"table.{suffix}"
    draw = random.Random(0)
    table = pl.DataFrame({"n": range(60_000), "s": [f"{'x' * draw.randint(80, 200)}\n" for _ in range(60_000)]})
    (table.write_csv if suffix == "csv" else table.write_ndjson)(path)
    part = path.stat().st_size / 3
    lazy = (pl.scan_csv if suffix == "csv" else pl.scan_ndjson)(path).select(pl.len(), c("n").sum())
    bf.collect(lazy, gang)  # brings in what a process reads for itself
    before = gang.run(bytes_read)
    found = bf.collect(lazy, gang)
    after = gang.run(bytes_read)
    assert found.rows() == [(60_000, sum(range(60_000)))]
    times = 2 if suffix == "csv" else 1  # for its quotes, and for its rows
    for one, other in zip(before, after, strict=True):
        assert 0.98 * times * part < other - one < 1.02 * times * part + (2 << 20), (one, other, part)
