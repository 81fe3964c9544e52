"""Groups that lie alone on a rank: what is told of them is what one process tells, which sees other rows, too."""

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from braidax.comm import Communicator
from braidax.frame import Memory, collect_partition
from tests.support.frame.running import united
from tests.support.frame.worlds import Worlds

# Of 1 to 3 rows each, so that ranks have groups of one row alone, and beside others.
TABLE = pl.DataFrame({"g": [g for g in range(30) for _ in range(1 + g % 3)]}).with_columns(
    f=pl.when(pl.col("g") % 2 == 0).then(pl.col("g").cast(pl.Float64)), i=pl.int_range(pl.len())
)
AGGREGATIONS = {
    "standard deviation": pl.col("f").std(ddof=0),
    "variance": pl.col("f").var(ddof=0) + 1,
    "correlation": pl.corr("f", "i"),
}


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("memory", [None, Memory(64 << 20)], ids=["in memory", "bounded"])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_groups_of_one_row_are_as_in_one_process(name: str, memory: Memory | None, worlds: Worlds) -> None:
    for few in (TABLE, TABLE.filter(pl.col("g").is_in([0, 3]))):
        plan = few.lazy().group_by("g").agg(AGGREGATIONS[name].alias("found"))

        def computed(comm: Communicator, plan: pl.LazyFrame = plan) -> pl.DataFrame:
            return collect_partition(plan, comm, memory=memory)

        found = united(worlds.run(3, computed))
        assert isinstance(found, pl.DataFrame), found
        assert_frame_equal(found.sort("g"), plan.collect(engine="in-memory").sort("g"))
