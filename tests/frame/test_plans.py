"""Plans as data: nothing of them is lost on the way, and only what is needed crosses an exchange."""

import math
import random
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.errors import ArgumentError, CommError
from braidax.frame import collecting
from braidax.frame.collecting import Partition, computed_by
from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.placing import check_hashes
from braidax.frame.plan import nodes
from braidax.frame.plan.expressions import is_rowwise, written
from braidax.frame.plan.nodes import read, read_bytes
from braidax.frame.plan.pushdown import pushed_down
from braidax.frame.plan.supplying import Reading, bytes_of, lazy_of, schema_of
from tests.support.comm.ranks import outcomes

TABLE = pl.DataFrame({"k": [1, 2, 3, 4], "v": [0.5, 1.5, 2.5, 3.5], "s": ["a", "b", "c", "d"]})


def again(lazy: pl.LazyFrame) -> pl.DataFrame:
    """Returns what a plan gives that was read and written."""
    root, tables = read(lazy)
    return lazy_of(root, {name: Reading(frame) for name, frame in tables.items()}).collect()


def test_floats_of_a_plan_are_exact() -> None:
    """In Polars' JSON one of five is another one."""
    draw = random.Random(0)
    drawn = [struct.unpack("<d", draw.randbytes(8))[0] for _ in range(500)] + [math.inf, -math.inf, 5e-324, -0.0]
    values = [value for value in drawn if not math.isnan(value)]
    lazy = TABLE.lazy().select(*[pl.lit(value).alias(str(i)) for i, value in enumerate(values)])
    found = again(lazy).row(0)
    assert struct.pack(f"{len(values)}d", *found) == struct.pack(f"{len(values)}d", *values)
    assert math.isnan(again(TABLE.lazy().select(pl.lit(math.nan))).item())


def test_equal_nodes_are_one() -> None:
    lazy = TABLE.lazy()
    root, tables = read(lazy.filter(pl.col("k") > 1).join(lazy.filter(pl.col("k") > 1), on="k"))
    assert root.inputs[0] is root.inputs[1]
    assert len(tables) == 1
    assert len(nodes.topological(root)) == 3


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"lazy_frame is a DataFrame: expected a polars.LazyFrame, as df.lazy\(\)"):
        read(TABLE)


def test_plans_of_a_polars_that_is_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_VERSIONS", {"0" * 64: "9.9"})
    with pytest.raises(
        ArgumentError, match=rf"polars is of version {pl.__version__}, .*: expected one of 9\.9; install"
    ):
        read(TABLE.lazy())


@pytest.mark.parametrize(
    ("expression", "alone"),
    [
        (pl.col("v") + 1, True),
        (pl.col("v") - pl.col("v").mean(), False),  # of the whole, Polars says that it is separable
        (pl.col("s").str.len_chars().is_in([1, 2]), True),
        (pl.when(pl.col("k") > pl.col("k").max()).then(1), False),
        (pl.col("v").shift(), False),
        (pl.col("v").sum().over("k"), False),
        (pl.int_range(pl.len()), False),
        (pl.lit(pl.Series([1, 2])), False),
        (pl.col("s").map_elements(len, return_dtype=pl.Int64), True),
        (pl.col("s").map_batches(lambda s: s), False),
        (pl.col("k").is_in(pl.col("v")), False),  # in all rows of the other column, which Polars does not say
        (pl.col("k").replace(pl.col("v"), 1), False),
        (pl.col("s").str.contains_any(pl.col("s")), False),
        (pl.col("s").str.contains(pl.col("s")), True),
        (pl.col("s").str.strptime(pl.Date), False),  # the format is that of the first rows
    ],
)
def test_which_expressions_look_at_one_row_alone(expression: pl.Expr, alone: bool) -> None:
    assert is_rowwise(written(expression)) == alone


def explained(lazy: pl.LazyFrame) -> list[str]:
    return [line.strip() for line in bf.explain(lazy).splitlines()]


@pytest.mark.usefixtures("shared")
def test_columns_and_rows_that_are_not_needed_do_not_cross(tmp_path: Path) -> None:
    TABLE.write_parquet(tmp_path / "a.parquet")
    lazy = pl.scan_parquet(tmp_path / "a.parquet")
    joined = lazy.join(lazy.select("k", w="v"), on="k").filter(pl.col("w") > 1).select("v")
    lines = explained(joined)
    assert any(line.startswith("HStack") and "1 columns are not needed" in line for line in lines)
    behind = lines.index(next(line for line in lines if line.startswith("Join")))
    assert any(line.startswith('Filter [(col("w")) > ') for line in lines[behind + 1 :])


def sent_bytes(lazy: pl.LazyFrame, size: int = 2) -> int:
    """Returns how many bytes ranks send for a plan, and checks what it gives."""

    def on_rank(comm: Any) -> tuple[pl.DataFrame, int]:
        ranks = Ranks(comm)
        root, here = read(lazy)
        parts = {
            name: Partition(frame[frame.height * comm.rank // size : frame.height * (comm.rank + 1) // size])
            for name, frame in here.items()
        }
        return computed_by(ranks, root, parts).frame, ranks.moved.num_bytes

    found = outcomes(size, on_rank)
    assert_frame_equal(pl.concat([frame for frame, _ in found]), lazy.collect(), check_row_order=False)
    return sum(count for _, count in found)


@pytest.mark.usefixtures("dealt")
def test_of_a_table_in_memory_only_what_an_exchange_needs_is_sent() -> None:
    wide = pl.DataFrame({"k": np.arange(8000), **{f"x{i}": np.arange(8000) + i for i in range(9)}}).lazy()
    two_columns = 8000 / 2 * 16
    group = wide.group_by("k").agg(pl.col("x1").n_unique())
    assert two_columns <= sent_bytes(group) < 1.2 * two_columns
    both = wide.filter(pl.col("x2") > 3).join(group, on="k").select("k", "x1", "x5")
    assert 2 * two_columns <= sent_bytes(both) < 2.4 * two_columns  # three columns of a side, the key of the other
    unfiltered = wide.join(wide.select("k", y="x3"), on="k").filter(pl.col("x4") < 1000).select("k", "y")
    assert sent_bytes(unfiltered) < 1.1 * 1000 * 16  # two columns of the 996 rows that remain of the left go to all


@pytest.mark.usefixtures("dealt")
def test_rows_go_as_soon_as_nobody_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node that two others read, when both have."""
    table = pl.DataFrame({"k": np.arange(4000) % 100, "v": np.arange(4000)}).lazy()
    shared = table.group_by("k").agg(pl.col("v").sum())
    lazy = shared.join(shared.select("k", w=pl.col("v") * 2), on="k").unique("k").sort("k")
    held: list[int] = []
    distinct = collecting._RULES["Distinct"]  # pyright: ignore[reportPrivateUsage]

    def look(runner: Any, node: Any, ordered: bool) -> Any:
        found = distinct(runner, node, ordered)
        held.append(sum(known.kind == "GroupBy" for _, _, known in runner._known.values()))
        return found

    monkeypatch.setattr(collecting, "_RULES", {**collecting._RULES, "Distinct": look})  # pyright: ignore[reportPrivateUsage]
    sent_bytes(lazy)
    assert held == [0, 0]


def test_a_plan_keeps_its_meaning_when_columns_are_not_needed() -> None:
    """A suffix, a place, a wildcard: each would mean another column of a narrower table."""
    lazy = TABLE.lazy()
    for plan in (
        lazy.join(lazy, on="k").select("v_right"),
        lazy.join(lazy, on="k").select(pl.nth(3)),
        lazy.sort("v").drop("s").select(pl.all().sum()),
        lazy.group_by("k").agg(pl.all().first()).select(pl.last()).sort(pl.all()),
    ):
        found = pl.concat(outcomes(3, lambda comm, plan=plan: bf.collect_partition(plan, comm)))
        assert_frame_equal(found.sort(pl.all()), plan.collect().sort(pl.all()))


def test_a_sort_by_several_keys_that_look_at_other_rows() -> None:
    """Each has hidden columns of its own."""
    lazy = TABLE.lazy().sort(pl.col("v").rank() % 2, pl.col("k").cum_sum().over(pl.col("k") % 2), pl.col("v").shift())
    found = pl.concat(outcomes(3, lambda comm: bf.collect_partition(lazy, comm)))
    assert_frame_equal(found, lazy.collect())


def test_nulls_that_nobody_needs_are_not_sent() -> None:
    wide = pl.DataFrame(
        {"k": np.arange(20_000), **{f"x{i}": np.random.default_rng(i).random(20_000) for i in range(9)}}
    )

    def sent(comm: Any) -> int:
        ranks = Ranks(comm)
        frame = wide if comm.rank == 0 else wide.clear()
        empty = [pl.lit(None, dtype=pl.Float64).alias(f"x{i}") for i in range(9)]
        got = ranks.spread(frame.with_columns(empty), first=0 if comm.rank == 0 else 20_000, total=20_000)
        assert got.schema == wide.schema
        assert got["x0"].null_count() == got.height == 10_000
        return ranks.moved.num_bytes

    assert 80_000 <= outcomes(2, sent)[0] < 100_000  # a column of ten


def test_ranks_that_hash_otherwise_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_objects(self: Ranks, value: bytes) -> Sequence[bytes]:
        return [value, value.replace(pl.__version__.encode(), b"9.9")]

    monkeypatch.setattr(Ranks, "all_objects", all_objects)

    def told(comm: Any) -> str:
        with pytest.raises(CommError) as caught:  # not out of the rank, which would end the other one
            check_hashes(Ranks(comm))
        return str(caught.value)

    assert outcomes(2, told)[0].startswith("Polars on rank 1 hashes otherwise than on rank 0")


def test_a_plan_that_writes_writes_once_and_nothing_before(tmp_path: Path) -> None:
    """Not on the empty tables by which Polars is asked what it needs."""
    path = tmp_path / "out.parquet"
    lazy = TABLE.lazy().sort("v").sink_parquet(path, lazy=True)
    root = read(lazy)[0]
    pushed_down(root)
    assert not path.exists()
    outcomes(2, lambda comm: bf.collect_partition(lazy, comm))
    assert_frame_equal(pl.read_parquet(path), TABLE)


def test_schemas_are_those_of_polars() -> None:
    lazy = TABLE.lazy().group_by("s").agg(pl.col("v").mean(), pl.col("k"))
    assert schema_of(read(lazy)[0]) == lazy.collect_schema()


def test_a_function_of_a_script_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(table: pl.DataFrame) -> pl.DataFrame:
        return table.select(pl.col("v") * 2)

    doubled.__module__, doubled.__qualname__ = "__main__", "doubled"
    lazy = pl.LazyFrame({"v": [1, 2]})
    with monkeypatch.context() as script:
        script.setattr(sys.modules["__main__"], "doubled", doubled, raising=False)
        root, memory = read(lazy.map_batches(doubled))
        plan = bytes_of(root)
    ((name, table),) = memory.items()
    found = lazy_of(read_bytes(plan), {name: Reading(table)}).collect()  # where __main__ has no such function
    assert found["v"].to_list() == [2, 4]
