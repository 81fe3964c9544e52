"""Buckets: rows split by their keys so finely that a bucket fits into a cache give what one process of Polars gives."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from braidax.frame import collect_partition
from braidax.frame.moving import splitting
from braidax.frame.moving.splitting import places_between, places_of, split
from braidax.frame.operators import placing
from braidax.frame.operators.reading import scanning
from tests.support.frame.queries.catalogue import CATALOGUE
from tests.support.frame.queries.query import Query
from tests.support.frame.running import Asked
from tests.support.frame.tables import SHAPES, Tables
from tests.support.frame.worlds import Worlds

STRIDE = 16
SHAPE_NAMES = list(SHAPES)
# By day all shapes, and all sizes: six queries, and the next six by night.
ASKED = [
    pytest.param(
        query, shape, size, id=f"{query.name}-{shape}-{size}", marks=() if number % 12 < 6 else pytest.mark.slow
    )
    for number, query in enumerate(CATALOGUE[5::STRIDE])
    for shape, size in [(SHAPE_NAMES[number % len(SHAPES)], (1, 2, 3)[number % 3])]
]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks put even tables of few rows into many buckets, also one that is alone."""
    monkeypatch.setattr(placing, "_BUCKET_BYTES", 64)
    monkeypatch.setattr(scanning, "_LARGE_BYTES", 0)


@pytest.fixture(params=["compiled", "NumPy"])
def binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits with what is compiled, and as where it is not."""
    if request.param == "NumPy":
        monkeypatch.setattr(splitting, "compiled", lambda: None)
    else:
        assert splitting.compiled() is not None


@pytest.mark.usefixtures("dealt", "small_buckets")
@pytest.mark.parametrize(("query", "shape", "size"), ASKED)
def test_small_buckets(query: Query, shape: str, size: int, tables: Callable[[str], Tables], worlds: Worlds) -> None:
    Asked.of(query, tables(shape)).on_ranks(size, worlds)


@pytest.mark.slow
@pytest.mark.usefixtures("dealt", "small_buckets")
@pytest.mark.parametrize("query", CATALOGUE, ids=lambda query: query.name)
def test_small_buckets_of_all_queries(query: Query, tables: Callable[[str], Tables], worlds: Worlds) -> None:
    Asked.of(query, tables("usual")).on_ranks(3, worlds)


def _frame(num_rows: int) -> pl.DataFrame:
    """Returns a table with columns of all widths, with and without nulls."""
    rng = np.random.default_rng(0)
    whole = pl.DataFrame(
        {
            "key": rng.integers(0, 1 << 40, num_rows),
            "byte": rng.integers(-100, 100, num_rows, dtype=np.int8),
            "short": rng.integers(0, 60_000, num_rows, dtype=np.uint16),
            "half": rng.random(num_rows, np.float32),
            "float": rng.random(num_rows),
        }
    )
    return whole.with_columns(
        pl.col("short").cast(pl.Date).alias("date"),
        pl.col("key").cast(pl.Datetime("us", "UTC")).alias("time"),
        pl.col("key").cast(pl.Duration("ns")).alias("span"),
        (pl.col("byte") > 0).alias("flag"),
        pl.col("key").cast(pl.String).alias("text"),
        pl.col("key").cast(pl.Decimal(38, 2)).alias("decimal"),
        pl.col("key").cast(pl.Int128).alias("wide"),
        pl.when(pl.col("byte") > 0).then("float").alias("some"),
        pl.concat_list("half", "half").alias("list"),
        pl.struct("byte", "float").alias("struct"),
        pl.lit(None).alias("none"),
    )


def _filtered(frame: pl.DataFrame, places: Sequence[int], num_parts: int) -> list[pl.DataFrame]:
    return [frame.filter(pl.Series(places, dtype=pl.UInt16) == part) for part in range(num_parts)]


@pytest.mark.usefixtures("binding")
@pytest.mark.parametrize(
    ("num_rows", "num_parts"),
    [(0, 3), (0, 257), (1, 2), (1, 257), *((1000, parts) for parts in (1, 2, 3, 127, 128, 129, 130, 255, 256, 257))],
)
def test_parts_have_their_rows_in_order(num_rows: int, num_parts: int) -> None:
    frame = _frame(num_rows)
    ends = [num_rows * one // num_parts for one in range(num_parts + 1)]
    chunked = pl.concat([frame[begin:end] for begin, end in itertools.pairwise(ends)], rechunk=False)
    places = np.random.default_rng(1).integers(0, num_parts, num_rows, dtype=np.uint16)
    for given in (frame, chunked):
        found = split(given, places, num_parts)
        assert len(found) == num_parts
        for part, expected in zip(found, _filtered(frame, places.tolist(), num_parts), strict=True):
            assert_frame_equal(part, expected)


@pytest.mark.parametrize(("size", "num_buckets"), [(1, 1), (3, 1), (1, 64), (3, 64), (4096, 16)])
def test_places_are_the_same_with_and_without_the_binding(
    size: int, num_buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = pl.Series(range(100_000)).hash(3)
    compiled = places_of(hashes, size, num_buckets)
    monkeypatch.setattr(splitting, "compiled", lambda: None)
    assert (compiled == places_of(hashes, size, num_buckets)).all()
    ranks, buckets = np.divmod(compiled, num_buckets)
    assert ranks.max() == size - 1
    assert (buckets == places_of(hashes, 1, num_buckets)).all()  # whatever rank it is
    if size < 10:
        assert np.bincount(ranks).min() > 0.97 * 100_000 / size  # all ranks get as many
        assert np.bincount(compiled).min() > 0.8 * 100_000 / size / num_buckets


def test_the_binding_refuses_what_would_leave_its_buffers() -> None:
    binding = splitting.compiled()
    assert binding is not None
    places, begins, positions = np.array([0, 1, 2], np.uint16), np.zeros(2, np.int64), np.empty(3, np.uint32)
    with pytest.raises(ValueError, match="a place of no part"):
        binding.positions(places, begins, positions)
    with pytest.raises(ValueError, match="a place of no part"):
        binding.positions(places, np.array([0, -1, 0]), positions)
    with pytest.raises(ValueError, match="a position beyond"):
        binding.positions(places, np.array([0, 1 << 32, 0]), positions)
    with pytest.raises(ValueError, match="buffers of other lengths"):
        binding.positions(places, begins, np.empty(2, np.uint32))
    with pytest.raises(ValueError, match="a place of no part"):
        binding.counts(places, np.empty(2, np.int64))
    with pytest.raises(ValueError, match="at most 65536 parts"):
        binding.counts(places, np.empty(65537, np.int64))
    none = np.zeros(0)
    for values, at, out, rest in (
        (np.zeros(3), [0, 1, 3], np.zeros(3), none),
        (np.zeros(3), [0, 1, 3], np.zeros(2), np.zeros(1)),
        (np.zeros(3), [0, 1, 2], np.zeros(2), none),
        (np.zeros(2), [0, 1, 2], np.zeros(3), none),
        (np.zeros(3), [0, 1, 2], np.zeros(2), np.zeros(9, np.uint8)),
    ):
        with pytest.raises(ValueError, match="a position for each"):
            binding.scatter(values, np.array(at, np.uint32), out, rest)
    for num_splitters in (0, 65536):
        with pytest.raises(ValueError, match="1 to 65535 splitters"):
            binding.ranges(np.zeros(3, np.int64), np.zeros(num_splitters, np.int64), np.zeros(3, np.uint16))
    with pytest.raises(ValueError, match="buffers of other lengths"):
        binding.ranges(np.zeros(3, np.int64), np.zeros(1, np.int64), np.zeros(2, np.uint16))
    with pytest.raises(ValueError, match="a power of two of buckets"):
        binding.places(np.zeros(3, np.uint64), 2, 3, np.zeros(3, np.uint16))
    with pytest.raises(ValueError, match="at most 65536 parts"):
        binding.places(np.zeros(3, np.uint64), 4096, 32, np.zeros(3, np.uint16))


@pytest.mark.parametrize("num_splitters", [1, 2, 3, 7, 8, 255, 256, 65535])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 1000])
def test_places_between_splitters_are_the_same_with_and_without_the_binding(
    num_splitters: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(num_splitters)
    splitters = np.sort(rng.integers(-(1 << 63), 1 << 62, num_splitters))
    values = np.concatenate([rng.integers(-(1 << 63), 1 << 62, num_rows), splitters[: num_rows // 2], splitters[-1:]])
    series = pl.concat([pl.Series(values[:3]), pl.Series(values[3:])], rechunk=False)
    found = places_between(series, splitters, num_threads=2)
    assert found.tolist() == [int((splitters <= value).sum()) for value in values]
    monkeypatch.setattr(splitting, "compiled", lambda: None)
    assert (found == places_between(series, splitters)).all()


@pytest.mark.usefixtures("dealt")
def test_rows_of_a_key_lie_in_one_bucket_of_one_rank(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_BUCKET_BYTES", 1024)
    left = pl.DataFrame({"k": np.arange(9000) % 300, "v": np.arange(9000)})
    counted: list[int] = []
    whole = placing.num_buckets

    def counting(*args: object) -> int:
        counted.append(whole(*args))  # pyright: ignore[reportArgumentType]
        return counted[-1]

    monkeypatch.setattr("braidax.frame.operators.skew.num_buckets", counting)
    lazy = left.lazy().join(left.lazy(), on="k").group_by("k").agg(pl.len(), pl.col("v").sum())
    found = worlds.run(2, lambda comm: collect_partition(lazy, comm))
    assert_frame_equal(pl.concat(found), lazy.collect(), check_row_order=False)
    assert counted
    assert min(counted) == max(counted) > 16
