"""Columns that travel as they lie: what ranks agree on, where rows go, and what comes that nobody expects."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from braidax.comm import Communicator
from braidax.errors import CommError
from braidax.frame.moving import columns
from braidax.frame.moving.columns import Buckets, Dealing, Offer
from braidax.frame.moving.ranks import Ranks
from tests.support.frame.worlds import Worlds

NUM_BUCKETS = 4
SIZE = 2


def rows(num_rows: int, seed: int) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    numbers = pl.DataFrame({"k": rng.integers(0, 1 << 40, num_rows), "b": rng.integers(0, 9, num_rows, dtype=np.int8)})
    return numbers.with_columns(t=pl.col("k").cast(pl.Datetime("us", "UTC")), n=pl.lit(None, dtype=pl.List(pl.Int8)))


def places(num_rows: int, seed: int, size: int) -> Any:
    return np.random.default_rng(seed).integers(0, size * NUM_BUCKETS, num_rows, dtype=np.uint16)


def dealing(*frames: pl.DataFrame) -> Dealing | None:
    offers = [Offer.of(frame, places(frame.height, i, SIZE), SIZE * NUM_BUCKETS) for i, frame in enumerate(frames)]
    return Dealing.of(offers, NUM_BUCKETS)


@pytest.mark.parametrize("size", [2, 3])
def test_each_bucket_has_its_rows_in_the_order_of_the_ranks(
    size: int, worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PIECE_BYTES", 200)  # of which a bucket takes several
    heights = [1000, 0, 300][:size]
    frames = [rows(height, seed) for seed, height in enumerate(heights)]
    to = [places(height, seed, size) for seed, height in enumerate(heights)]

    def deal(comm: Communicator) -> tuple[list[pl.DataFrame], int]:
        ranks = Ranks(comm)
        return ranks.deal_in_buckets(frames[comm.rank], to[comm.rank], NUM_BUCKETS), ranks.moved.num_rows

    for rank, (found, sent) in enumerate(worlds.run(size, deal)):
        for bucket, one in enumerate(found):
            place = rank * NUM_BUCKETS + bucket
            whole = [frame.filter(pl.Series(at == place)) for frame, at in zip(frames, to, strict=True)]
            assert_frame_equal(one, pl.concat(whole))
            assert one.n_chunks() == 1
        assert sent == int((to[rank] // NUM_BUCKETS != rank).sum())


def test_only_numbers_and_nulls_travel_so() -> None:
    one, other = rows(20, 0), rows(30, 1)
    found = dealing(one, other)
    assert found is not None
    assert found.numbers == ("k", "b", "t")
    assert found.counts.sum(axis=(1, 2)).tolist() == [20, 30]
    assert dealing(one, other.clear()) is not None
    some = pl.when(pl.int_range(pl.len()) > 0).then("k")
    for change in ({"k": pl.col("k").cast(pl.String)}, {"k": some}, {"k": pl.lit(None, dtype=pl.Int64)}):
        assert dealing(one, other.with_columns(**change)) is None
    assert dealing(one.clear(), other.clear()) is None
    assert dealing(one, other.rename({"k": "l"})) is None


def item(bucket: int, row: int, *parts: Any) -> Sequence[Any]:
    return [columns._MARK.pack(bucket, row), *parts]  # pyright: ignore[reportPrivateUsage]


def test_rows_that_nobody_expects_are_errors() -> None:
    one, other = rows(50, 0), rows(60, 1)
    found = dealing(one, other)
    assert found is not None
    here = Buckets(one, places(50, 0, SIZE), found, rank=0, num_threads=1)
    count = int(found.counts[1, 0, 2])
    assert count > 2
    good = [np.zeros(count, np.int64), np.zeros(count, np.int8), np.zeros(count, np.int64)]
    more = [np.zeros(count + 1, one.dtype) for one in good]
    for wrong in (
        item(NUM_BUCKETS, 0, *good),
        item(2, 1, *good),
        item(2, count, *good),
        item(2, 0, *good[:2]),
        item(2, 0, *good, good[0]),
        item(2, 0, *more),
        item(2, 0, good[0], good[0], good[0]),
        item(2, 0, good[0].view(np.int8)[:-1], *good[1:]),
        item(2, 0, *(one[:0] for one in good)),
        item(2, 0),
    ):
        with pytest.raises(CommError, match="came of rank 1; install the same versions"):
            here.add(1, wrong)
    here.add(1, item(2, 0, *(one[:2] for one in good)))
    with pytest.raises(CommError, match="row 0 of bucket 2 came of rank 1"):
        here.add(1, item(2, 0, *good))
    with pytest.raises(CommError, match="did not come of rank 1"):
        here.done()
