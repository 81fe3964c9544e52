"""Data sets of Ray as frames and back, on a real cluster of this machine: values, order, bad input, what moves."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import ray
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.errors import ArgumentError, GangError
from braidax.gang import LocalGang
from braidax.gang.ray import RayGang
from tests.support.frame.running import names_kept
from tests.support.gang.ray_cluster import ray_cluster

ROWS = 50_000  # of a block

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning"),  # as in tests/gang/test_ray.py
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Ray's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def gang() -> Iterator[RayGang]:
    with ray_cluster(num_cpus=3):  # a process each
        ray.data.DataContext.get_current().enable_progress_bars = False
        with RayGang(2, num_cpus=0.5, timeout_seconds=200) as gang:
            yield gang


def block(number: int) -> pa.Table:
    """Returns numbers, in a process of Ray."""
    rng = np.random.default_rng(number)
    return pa.table({"k": rng.integers(0, 50, ROWS), "x": rng.random(ROWS), "y": np.full(ROWS, number)})


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns how large what this process gets from Ray is, and what it puts there, each time."""
    sizes: list[int] = []
    get, put = ray.get, ray.put

    def counting_get(*args: Any, **options: Any) -> Any:
        found = get(*args, **options)
        sizes.append(len(ray.cloudpickle.dumps(found)))
        return found

    def counting_put(value: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(ray.cloudpickle.dumps(value)))
        return put(value, *args, **options)

    monkeypatch.setattr(ray, "get", counting_get)
    monkeypatch.setattr(ray, "put", counting_put)
    return sizes


def test_blocks_go_over_in_order_and_come_back(gang: RayGang, read_bytes: list[int]) -> None:
    whole = pl.concat([pl.DataFrame(pl.from_arrow(block(number))) for number in range(5)])
    dataset = ray.data.from_arrow_refs([ray.remote(block).remote(number) for number in range(5)])
    frame = bf.from_ray(dataset, gang)
    back = bf.to_ray(frame.with_columns((pl.col("x") * 2).alias("z")))
    assert back.count() == 5 * ROWS
    assert 0 < sum(read_bytes) < whole.estimated_size() / 20, "rows went through this process"
    assert gang.run(numbers_there, gang.kept(gang.names()[0])) == [[0, 1], [2, 3, 4]]
    found = pl.concat([pl.DataFrame(pl.from_arrow(one)) for one in ray.get(back.to_arrow_refs())])
    assert sum(read_bytes) > whole.estimated_size()  # as when they do
    assert_frame_equal(found, whole.with_columns((pl.col("x") * 2).alias("z")))
    sums = frame.group_by("k").agg(pl.col("x").sum(), pl.len()).sort("k").collect()
    assert_frame_equal(sums, whole.group_by("k").agg(pl.col("x").sum(), pl.len()).sort("k"))


def numbers_there(comm: Any, kept: Any) -> list[int]:
    del comm
    return sorted(set(kept.frame["y"].to_list()))


@pytest.mark.slow  # a gang more, which is two processes; by day in test_dask.py
def test_what_comes_back_stays_behind_the_gang(gang: RayGang) -> None:
    with RayGang(2, num_cpus=0.5) as other:
        table = pl.DataFrame({"a": range(10), "s": [f"t{i % 3}" for i in range(10)]})
        back = bf.to_ray(bf.from_polars(table, other).sort("a", descending=True))
        assert other.names() == ()
    assert [row["a"] for row in back.take_all()] == list(range(9, -1, -1))
    assert_frame_equal(bf.from_ray(back, gang).collect(), table.sort("a", descending=True))


def test_what_is_lazy_is_computed_by_ray_and_blocks_of_nulls_fit(gang: RayGang) -> None:
    dataset = ray.data.range(100, override_num_blocks=2).map_batches(lambda batch: {"n": batch["id"] * 2})
    assert bf.from_ray(dataset, gang).select(pl.col("n").sum()).collect().item() == 9900
    mixed = ray.data.from_arrow([pa.table({"a": pa.nulls(2), "b": ["x", "y"]}), pa.table({"a": [1], "b": ["z"]})])
    assert bf.from_ray(mixed, gang).collect().rows() == [(None, "x"), (None, "y"), (1, "z")]
    none = bf.from_ray(ray.data.from_arrow(pa.table({"a": pa.array([], pa.int32())})), gang).collect()
    assert none.equals(pl.DataFrame(schema={"a": pl.Int32()}))


NUMBERS = pa.table({"a": [1, 2]})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"a": [0.5]}, "partition 1 has Float64 in the column 'a', and partition 0 Int64; expected one dtype in all"),
        pytest.param(
            {"b": [1]},
            r"partition 1 has the columns \['b'\], and partition 0 \['a'\]; expected the same in all",
            marks=pytest.mark.slow,  # by day in test_dask.py
        ),
    ],
)
def test_blocks_that_cannot_be_are_named(other: dict[str, list[Any]], words: str, gang: RayGang) -> None:
    before = names_kept(gang)
    with pytest.raises(ArgumentError, match=f"^{words}"):
        bf.from_ray(ray.data.from_arrow([NUMBERS, pa.table(other)]), gang)
    assert gang.names() == before


def test_columns_of_python_objects_are_named(gang: RayGang) -> None:
    dataset = ray.data.from_items([{"a": 1, "b": {1, 2}}, {"a": 2, "b": object}])
    with pytest.raises(ArgumentError, match=r"^partition \d: the column 'b' has .*, which Polars cannot represent"):
        bf.from_ray(dataset, gang)


def test_gangs_and_data_that_do_not_fit_are_refused(gang: RayGang) -> None:
    import dask.dataframe as dd
    import pandas as pd

    collection = dd.from_pandas(pd.DataFrame({"a": [1]}), npartitions=1)
    with pytest.raises(ArgumentError, match=r"^dataset is a dask\.dataframe\..*DataFrame: expected a ray.data.Dataset"):
        bf.from_ray(collection, gang)
    with pytest.raises(ArgumentError, match=r"^gang is a RayGang: expected a DaskGang, whose ranks are Dask's"):
        bf.from_dask(collection, gang)
    with pytest.raises(ArgumentError, match=r"^(dataset is empty: expected one block|partition 0 has no columns)"):
        bf.from_ray(ray.data.from_items([]), gang)
    local = LocalGang(1)
    with pytest.raises(ArgumentError, match=r"^gang is a LocalGang: expected a RayGang, whose ranks read Ray's"):
        bf.from_ray(ray.data.range(3), local)
    with pytest.raises(ArgumentError, match=r"^frame is one of a LocalGang: expected one of a RayGang"):
        bf.to_ray(bf.from_polars(pl.DataFrame({"a": [1]}), local))
    with pytest.raises(GangError, match=r"^the gang can take nothing from its cluster: it does not run; call replace"):
        bf.from_ray(ray.data.range(3), RayGang(1))
    wide = pl.DataFrame({"a": [1]}, schema={"a": pl.UInt128})
    with pytest.raises(ArgumentError, match=r"^the column 'a' has UInt128, which Arrow cannot represent: expected"):
        bf.to_ray(bf.from_polars(wide, gang))
