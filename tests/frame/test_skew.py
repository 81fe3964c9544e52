"""Heavy keys: a join in which half of the rows have one key fills all ranks evenly."""

from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.frame.moving.ranks import Ranks
from braidax.frame.operators.placing import key_hashes
from braidax.frame.operators.skew import heavy_hashes
from braidax.frame.plan.expressions import column
from tests.support.comm.ranks import in_turns, outcomes

ROWS, SIZE = 60_000, 3

pytestmark = pytest.mark.usefixtures("dealt")


def tables(*, of_nulls: bool = False) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Returns a table in which half of the rows have one key, and one to join with it."""
    rng = np.random.default_rng(0)
    keys = np.where(rng.random(ROWS) < 0.5, 7, rng.integers(0, 50_000, ROWS))
    left = pl.DataFrame({"k": keys, "v": rng.random(ROWS)})
    if of_nulls:
        left = left.with_columns(pl.when(pl.col("k") != 7).then("k"))
    right = pl.DataFrame({"k": rng.permutation(50_000)[:30_000], "w": rng.random(30_000)})
    return left, right


@pytest.mark.parametrize(
    ("how", "heavy"), in_turns(["inner", "left", "semi", "anti", "right", "full"], ["a key", "nulls"], every=2)
)
def test_half_of_the_rows_have_one_key(how: Any, heavy: str) -> None:
    left, right = tables(of_nulls=heavy == "nulls")
    right = pl.concat([right, pl.DataFrame({"k": [7], "w": [0.5]})])
    for lazy in (left.lazy().join(right.lazy(), on="k", how=how), right.lazy().join(left.lazy(), on="k", how=how)):
        found = outcomes(SIZE, lambda comm, lazy=lazy: bf.collect_partition(lazy, comm))
        assert_frame_equal(pl.concat(found), lazy.collect(), check_row_order=False)


def test_all_ranks_get_as_many_rows() -> None:
    left, right = tables()
    right = right.filter(pl.col("k") != 7).vstack(pl.DataFrame({"k": [7], "w": [0.5]}))
    for how in ("inner", "left"):
        lazy = left.lazy().join(right.lazy(), on="k", how=how)
        heights = [part.height for part in outcomes(SIZE, lambda comm, lazy=lazy: bf.collect_partition(lazy, comm))]
        assert max(heights) < 1.2 * min(heights), heights


def test_only_heavy_keys_are_found_and_by_all_ranks() -> None:
    heavy = key_hashes(pl.DataFrame({"k": [7, 101, 102]}), [column("k")]).sort().to_list()

    def found(comm: Any) -> list[int] | None:
        keys = np.full(10_000, comm.rank + 100)
        keys[: 4000 + 3000 * (comm.rank == 0)] = 7  # 15,000 of 30,000 rows
        hashes = heavy_hashes(Ranks(comm), pl.DataFrame({"k": keys}), [column("k")], [pl.Int64()])
        return None if hashes is None else hashes.to_list()

    first, *others = outcomes(3, found)
    assert first == heavy  # of 6,000 rows, and of half of an even part, 5,000
    assert others == [first, first]
    even = pl.DataFrame({"k": range(30_000)})
    assert outcomes(3, lambda comm: heavy_hashes(Ranks(comm), even, [column("k")], [pl.Int64()])) == [None] * 3
