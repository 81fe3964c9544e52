"""Tables in bounded memory: where everything waits on disk, results are what they are without a limit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.comm import Communicator
from braidax.frame.spilling import store
from braidax.frame.spilling.memory import Budget
from tests.comm.ranks import outcomes

MEMORY = bf.Memory(limit_bytes=32 << 20)
ROWS = 20_000


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget by which nearly every row waits on disk, and every table is in partitions of partitions."""

    def of(memory: bf.Memory, size: int) -> Budget:
        del memory
        return Budget(block_bytes=16 << 10, bucket_bytes=64 << 10, kept_bytes=16 << 10, window_bytes=size * (9 << 18))

    monkeypatch.setattr(Budget, "of", of)


def tables() -> tuple[pl.LazyFrame, pl.LazyFrame]:
    """Returns two tables in which half of the rows have one key, and some have none."""
    rng = np.random.default_rng(0)
    keys = np.where(rng.random(ROWS) < 0.5, 7, rng.integers(0, 5000, ROWS))
    left = pl.DataFrame({"k": keys, "v": rng.random(ROWS), "s": [f"a text {i % 3000}" for i in range(ROWS)]})
    right = pl.DataFrame({"k": rng.integers(0, 6000, ROWS // 2), "w": rng.random(ROWS // 2)})
    right = pl.concat([right.filter(pl.col("k") != 7), pl.DataFrame({"k": [7, 7], "w": [0.25, 0.75]})])
    nulls = pl.when(pl.col("k") % 50 > 0).then("k").alias("k")
    return left.with_columns(nulls).lazy(), right.with_columns(nulls).lazy()


def spilled(monkeypatch: pytest.MonkeyPatch) -> list[store.Spilled]:
    """Returns what ranks write to disk from now on."""
    found: list[store.Spilled] = []
    initial: Any = store.Spill.__init__

    def init(self: store.Spill, *args: Any) -> None:
        initial(self, *args)
        found.append(self.spilled)

    monkeypatch.setattr(store.Spill, "__init__", init)
    return found


def asked(lazy: pl.LazyFrame) -> Callable[[Communicator], pl.DataFrame]:
    return lambda comm: bf.collect_partition(lazy, comm, memory=MEMORY)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("how", ["inner", "left", "right", "full", "semi", "anti"])
def test_joins(how: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = spilled(monkeypatch)
    left, right = tables()
    for lazy in (left.join(right, on="k", how=how), right.join(left, on="k", how=how, nulls_equal=True)):
        parts = outcomes(size, asked(lazy))
        assert_frame_equal(pl.concat(parts), lazy.collect(), check_row_order=False)
        assert all(one.num_bytes > 100_000 for one in found)
