"""What a plan did on each rank: rows, bytes and seconds, and what one rank computed for all."""

import time
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.comm import Communicator
from braidax.errors import CallFailed
from braidax.frame import collecting
from braidax.frame.explaining import computed_on_one_rank
from braidax.frame.plan.nodes import read, topological
from braidax.frame.plan.ways import WHOLE
from braidax.frame.sight.measuring import PHASES, Phase, Work
from braidax.frame.sight.operation import Operation, size_of
from braidax.frame.sight.profiled import Profile, profile_of
from braidax.gang import LocalGang
from tests.support.frame.queries.catalogue import CATALOGUE
from tests.support.frame.tables import Tables
from tests.support.frame.worlds import Worlds

ROWS = 6000
SIZE = 3
SLEPT_SECONDS = 0.2
TOLD = ("Select", "HStack", "Filter", "MapFunction", "Pivot")


def table() -> pl.DataFrame:
    return pl.DataFrame({"k": [i % 100 for i in range(ROWS)], "v": [float(i) for i in range(ROWS)]})


def found(profile: Profile, kind: str) -> Operation:
    (operation,) = (one for one in profile.operations if one.text.startswith(kind))
    return operation


def test_rows_and_bytes_of_an_exchange_are_those_that_were_sent(gang: LocalGang) -> None:
    lazy = table().lazy().sort("v", descending=True).with_columns(pl.col("k") + 1)
    result, profile = bf.profile(lazy, gang)
    assert_frame_equal(result, lazy.collect())
    source = found(profile, "table")
    assert [work.num_rows for work in source.works] == [ROWS // SIZE] * SIZE
    assert source.num_bytes == ROWS * 16
    assert (source.skew, source.within) == (1.0, None)
    sort = found(profile, "Sort")
    # All rows of the outer ranks go to the other end; the middle one has a sample to send, as they do, and few rows.
    sent = [work.sent_rows for work in sort.works]
    share = ROWS // SIZE
    assert sent[0] == sent[2] >= share
    assert sent[0] - sent[1] == pytest.approx(share, rel=0.1)
    assert 16 <= sum(work.sent_bytes for work in sort.works) / sum(sent) < 40
    top = found(profile, "HStack")
    assert (profile.operations.index(top), top.num_rows, sort.num_rows) == (0, ROWS, None)
    assert sort.within == 0
    assert found(profile, "table").depth == 2


def test_a_gather_sends_all_rows_of_all_ranks_but_one(gang: LocalGang) -> None:
    _, profile = bf.profile(table().lazy().with_columns(pl.col("v").rank().alias("place")), gang)
    stack = found(profile, "HStack")
    share = ROWS // SIZE
    # `v` to rank 0, and what comes of it back.
    assert [work.sent_rows for work in stack.works] == [2 * share, share, share]
    assert [work.num_exchanges for work in stack.works] == [2] * SIZE
    for work, rows in zip(stack.works, [2 * share, share, share], strict=True):
        assert rows * 8 <= work.sent_bytes < rows * 9.5
    assert stack.num_rows == ROWS
    assert stack.num_bytes is not None
    assert ROWS * 24 <= stack.num_bytes <= ROWS * 25


def test_every_second_counts_once_and_as_what_it_was(gang: LocalGang) -> None:
    def slow(frame: pl.DataFrame) -> pl.DataFrame:
        time.sleep(SLEPT_SECONDS * (frame["v"].max() == ROWS - 1))  # on the last rank only
        return frame

    lazy = table().lazy().map_batches(slow, streamable=True, schema=table().schema).sort("k", "v")
    start = time.perf_counter()
    _, profile = bf.profile(lazy, gang)
    wall = time.perf_counter() - start
    assert profile.seconds <= wall
    for rank in range(SIZE):
        seconds = profile.rank_seconds(rank)
        assert tuple(seconds) == PHASES
        assert all(value >= 0 for value in seconds.values())
        assert SLEPT_SECONDS < sum(seconds.values()) <= profile.seconds
    slept = found(profile, "MapFunction").works
    assert slept[2].seconds["local"] > SLEPT_SECONDS
    assert max(work.seconds["local"] for work in slept[:2]) < SLEPT_SECONDS
    waited = [work.seconds["wait"] for work in found(profile, "Sort").works]
    assert min(waited[:2]) > SLEPT_SECONDS / 2 > waited[2]


def test_skew_is_that_of_the_fullest_rank(gang: LocalGang) -> None:
    lazy = table().lazy().with_columns(pl.when(pl.col("k") < 50).then(0).otherwise("k").alias("k"))
    _, profile = bf.profile(lazy.group_by("k").agg(pl.col("v").median()).head(3), gang)
    assert found(profile, "HStack").skew == 1.0
    kept = table().lazy().filter(pl.col("v") < ROWS / SIZE).unique("v")
    _, profile = bf.profile(kept, gang)
    assert found(profile, "Filter").skew == float(SIZE)
    _, empty = bf.profile(kept.filter(pl.col("v") < -1).sort("k"), gang)
    assert empty.operations[0].skew is None
    assert "[0 rows, 0 B]" in str(empty)


def test_single_expressions_that_one_rank_computes_are_named(gang: LocalGang) -> None:
    lazy = (
        table()
        .lazy()
        .with_columns(
            pl.col("v").shift(1).cum_sum().rolling_max(3).alias("before"),
            pl.col("v").reverse().shift(1).alias("backward"),
            (pl.col("v") - pl.col("v").mean()).alias("centered"),
            (pl.col("v").rank() + pl.col("v").sum()).alias("rank"),
            pl.rolling_corr("v", "k", window_size=3).alias("correlated"),
            pl.col("v").max().over("k").alias("most"),
        )
    )
    correlated = str(pl.rolling_corr("v", "k", window_size=3))
    expected = [str(pl.col("v").reverse()), str(pl.col("v").rank()), correlated]
    frame = bf.from_polars(lazy, gang)
    assert [one.rpartition(": col(")[2] for one in frame.on_one_rank] == [one[4:] for one in expected]
    assert f"; on one rank: {', '.join(expected)}" in frame.explain()
    result, profile = frame.profile()
    assert_frame_equal(result, lazy.collect())
    assert profile.on_one_rank == frame.on_one_rank
    assert found(profile, "HStack").on_one_rank == tuple(expected)
    nothing = bf.from_polars(table(), gang).sort("v")
    assert (nothing.on_one_rank, nothing.profile()[1].on_one_rank) == ((), ())
    whole = bf.from_polars(table(), gang).select(pl.col("v").top_k(3))
    assert whole.on_one_rank == (f'Select col("v").top_k([dyn int: 3]): {WHOLE}',)
    assert whole.profile()[1].on_one_rank == whole.on_one_rank
    assert "one rank computed" not in str(whole.profile()[1])  # the plan says so


def test_a_gang_of_one_rank_has_one_piece() -> None:
    with LocalGang(1) as alone:
        result, profile = bf.profile(table().lazy().filter(pl.col("k") < 10).sort("v").select("v"), alone)
    assert result.height == ROWS / 10
    assert [one.within for one in profile.operations[1:-1]] == [0] * (len(profile.operations) - 2)
    assert profile.operations[0].num_rows == ROWS / 10
    assert profile.operations[0].works[0].seconds["local"] > 0
    assert str(profile).startswith("1 rank, ")


def test_the_table_of_a_profile_has_a_row_for_each_operation_and_rank(gang: LocalGang) -> None:
    _, profile = bf.profile(table().lazy().sort("v"), gang)
    rows = profile.table()
    assert rows.height == len(profile.operations) * SIZE
    assert rows.filter(pl.col("text").str.starts_with("Sort"))["sent_rows"].to_list() == [
        work.sent_rows for work in found(profile, "Sort").works
    ]
    phases: list[Phase] = ["partition", "serialize", "wire", "wait", "spill", "local"]
    assert rows.columns[-6:] == [f"{phase}_seconds" for phase in phases]
    assert found(profile, "Sort").seconds("local") == max(
        rows.filter(pl.col("text").str.starts_with("Sort"))["local_seconds"]
    )


def test_a_plan_that_is_read_twice_is_shown_once(gang: LocalGang) -> None:
    source = table().lazy().group_by("k").agg(pl.col("v").sum())
    both = source.join(source.filter(pl.col("v") > 0), on="k")
    _, profile = bf.profile(both, gang)
    assert sum(one.text.startswith("GroupBy") for one in profile.operations) == 1
    assert found(profile, "GroupBy").num_rows == 100


def test_what_fails_fails_as_without_a_profile(gang: LocalGang) -> None:
    with pytest.raises(CallFailed, match="conversion from `str` to `i64` failed"):
        bf.profile(table().lazy().with_columns(pl.lit("x").alias("s") + "y").with_columns(pl.col("s").cast(int)), gang)
    with pytest.raises(pl.exceptions.ColumnNotFoundError):
        bf.profile(table().lazy().select("absent"), gang)


def measured(lazy: pl.LazyFrame) -> Callable[[Communicator], Profile]:
    """Returns what each rank calls: it gives the profile, as of the ranks of a gang."""

    def call(comm: Communicator) -> Profile:
        root, memory = read(lazy)
        parts: Mapping[str, pl.DataFrame] = {
            name: frame[frame.height * comm.rank // comm.size : frame.height * (comm.rank + 1) // comm.size]
            for name, frame in memory.items()
        }
        tables = {name: collecting.Partition(part) for name, part in parts.items()}
        _, pushed, found = collecting.measured(root, tables, comm)
        assert len(found.works) == len(topological(pushed))
        return profile_of(pushed, [found], 1.0)

    return call


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_what_explain_says_of_one_rank_is_what_one_rank_does(
    every: int, worlds: Worlds, tables: Callable[[str], Tables]
) -> None:
    """Of joins, groups and sorts the plan alone does not tell all."""
    compared = 0
    for query in CATALOGUE[::every]:
        try:
            lazy = query.build(tables("usual"))
            told = computed_on_one_rank(lazy)
        except Exception:  # noqa: BLE001 (it is a query that must fail, which others test)
            continue
        profiles = worlds.run(2, measured(lazy))
        if any(isinstance(one, BaseException) for one in profiles):
            continue
        done = [one for one in profiles[0].on_one_rank if one.startswith(TOLD) or one in told]
        assert sorted(set(told)) == sorted(set(done)), query.name
        compared += bool(done)
    assert compared > 80 // every


class _Bars(HTMLParser):
    """Reads a page. **Fields:** `bars`: the widths of each bar, by class. `open`: tags that are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.bars: list[dict[str, float]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert not {"src", "href"} & set(given)
        if given.get("class") == "bar":
            self.bars.append({})
        elif tag == "span" and "style" in given:
            self.bars[-1][given["class"]] = float(given["style"].removeprefix("width: ").removesuffix("%"))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_has_a_bar_for_each_operation_and_rank_and_needs_nothing_else(tmp_path: Path) -> None:
    """A plan may say anything: it is text in the page."""
    quick, slow = Work(5, 40, seconds={"local": 0.5}), Work(15, 120, 7, 2048, 1, {"wire": 1.0, "wait": 3.0}, 5 << 20, 9)
    top = Operation("Filter <script>alert(1)</script>", 0, (1,), None, ("shift <1>",), (quick, slow))
    below = Operation("Sort   ← rows dealt", 1, (), 0, (), (Work(), Work()))
    profile = Profile((top, below), (Work(seconds={"partition": 0.04}), Work()), 5.0)
    profile.save_html(tmp_path / "profile.html")
    page = (tmp_path / "profile.html").read_text(encoding="utf-8")
    read_page = _Bars(page)
    assert read_page.open == []
    # On one scale: the second rank took 4 s for the first operation.
    expected = [{"local": 12.5}, {"wire": 25.0, "wait": 75.0}, {}, {}, {"partition": 1.0}, {}]
    assert read_page.bars == expected
    assert "<script" not in page
    assert "http" not in page
    for text in (
        "Filter <script>alert(1)</script>",
        "one rank: shift <1>",
        "computed with 0",
        "1.50",
        "2.0 KiB",
        "5.0 MiB",
    ):
        assert text in read_page.text
    assert "2 ranks, 5.000 s, of which 4.000 s on the ranks; on one rank: 1 operations and expressions" in page


def test_a_page_of_a_plan(gang: LocalGang, tmp_path: Path) -> None:
    _, profile = bf.profile(table().lazy().sort("v"), gang)
    profile.save_html(str(tmp_path / "profile.html"))
    bars = _Bars((tmp_path / "profile.html").read_text(encoding="utf-8")).bars
    assert len(bars) == SIZE * (1 + len(profile.operations))
    assert max(sum(bar.values()) for bar in bars) == pytest.approx(100, abs=1)


def test_sizes() -> None:
    assert [size_of(n) for n in (0, 1023, 1024, 3 << 20, 5 << 40)] == [
        "0 B", "1,023 B", "1.0 KiB", "3.0 MiB", "5,120.0 GiB",
    ]  # fmt: skip
