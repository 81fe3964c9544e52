"""Groups: what ranks have of a group is aggregated before it moves where groups are few, and only there."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from braidax.frame.collecting import Partition, computed_by, measured
from braidax.frame.moving.ranks import Ranks
from braidax.frame.plan.nodes import Node, read, topological
from braidax.frame.sight.measuring import Work
from tests.support.comm.ranks import outcomes

ROWS = 100_000
RNG = np.random.default_rng(0)
FEW = RNG.integers(0, 30_000, 2 * ROWS)  # a sample of 20,000 rows has seldom two of a group
IN_A_ROW = RNG.permutation(2 * ROWS // 4).repeat(4)  # a sample that is spread has never two of a group
EVERY = RNG.permutation(2 * ROWS)


def parts(keys: Any, comm: Any, memory: Mapping[str, pl.DataFrame]) -> dict[str, Partition]:
    (name,) = memory
    half = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    return {name: Partition(pl.DataFrame({"k": keys[half], "v": np.arange(2 * ROWS)[half]}))}


@pytest.mark.parametrize(
    ("keys", "most", "least"),
    [(FEW, 30_000, 28_000), (IN_A_ROW, ROWS // 4, ROWS // 5), (EVERY, ROWS + 1000, ROWS - 1000)],
    ids=["few", "in a row", "every"],
)
def test_groups_move_instead_of_rows_where_they_are_fewer(keys: Any, most: int, least: int) -> None:
    like = pl.LazyFrame({"k": keys[:1], "v": [0]})
    lazy = like.group_by("k").agg(pl.col("v").sum(), pl.len(), pl.col("v").max().alias("last"))
    root, memory = read(lazy)

    def run(comm: Any) -> tuple[pl.DataFrame, int]:
        ranks = Ranks(comm)
        return computed_by(ranks, root, parts(keys, comm, memory)).frame, ranks.moved.num_rows

    found = outcomes(2, run)
    table = pl.DataFrame({"k": keys, "v": np.arange(2 * ROWS)})
    expected = table.group_by("k").agg(pl.col("v").sum(), pl.len(), pl.col("v").max().alias("last"))
    assert_frame_equal(pl.concat([frame for frame, _ in found]).sort("k"), expected.sort("k"))
    assert least <= sum(count for _, count in found) <= most


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Returns files of few groups, behind a first one whose rows a filter drops."""
    paths = [tmp_path / f"{i}.parquet" for i in range(8)]
    for i, path in enumerate(paths):
        pl.DataFrame({"k": np.arange(5000) % 7, "v": np.arange(5000) + 5000 * i}).write_parquet(path)
    return list(map(str, paths))


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("change", "is_one"),
    [
        (lambda plan: plan.filter(pl.col("v") >= 0), True),
        (lambda plan: plan.filter(pl.col("v") % 5000 == 4999), False),  # the first rows tell nothing
        (lambda plan: plan.with_columns(pl.col("v").map_elements(abs, return_dtype=pl.Int64)), False),
    ],
    ids=["plain", "no first rows", "a user's function"],
)
def test_rows_are_read_and_aggregated_in_one_go_where_the_first_ones_tell(
    files: list[str], change: Callable[[pl.LazyFrame], pl.LazyFrame], is_one: bool
) -> None:
    lazy = change(pl.scan_parquet(files)).group_by("k").agg(pl.col("v").sum())
    root, _ = read(lazy)

    def run(comm: Any) -> tuple[pl.DataFrame, Node, Sequence[Work]]:
        part, pushed, found = measured(root, {}, comm)
        return part.frame, pushed, found.works

    found = outcomes(2, run)
    assert_frame_equal(pl.concat([frame for frame, _, _ in found]).sort("k"), lazy.collect().sort("k"))
    for _, pushed, works in found:
        nodes = topological(pushed)
        (group,) = [node for node in nodes if node.kind == "GroupBy"]
        assert (works[nodes.index(group.inputs[0])].num_rows is None) == is_one
