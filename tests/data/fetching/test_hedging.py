"""Hedging: a read that hangs is done a second time, and whatever it writes later reaches no batch."""

import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from braidax.data.fetching import fetch
from braidax.data.knobs import Knobs
from braidax.data.loader import DataLoader
from braidax.errors import ReadError
from tests.support.data.numbered import Large, Numbers, all_ids, check, ids, peeked, reading_threads


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",))


class Straggler(Numbers):
    """Every read of record `slow` but its second one hangs until released, and then writes rubbish."""

    def __init__(self, num_samples: int, slow: int) -> None:
        super().__init__(num_samples)
        self.slow = slow
        self.release = threading.Event()
        self.times = 0
        self.wrote_rubbish = threading.Event()

    def read(self, indices: np.ndarray, out: Any) -> None:
        if self.slow in indices:
            self.times += 1
            if self.times == 1:
                self.release.wait(60)
                out["x"][...] = -1
                out["id"][...] = -1
                self.wrote_rubbish.set()
                return
        super().read(indices, out)


def test_a_read_that_hangs_is_hedged_and_its_late_writing_reaches_no_batch(mesh: Mesh) -> None:
    source = Straggler(400, slow=0)
    loader = DataLoader(source, mesh, P("data"), batch_size=8, knobs=Knobs(threads=2, prefetch=2))
    expected = peeked(loader, 50)
    source.slow = expected[40][3]  # by then enough reads were seen
    batches, numbers = list[Any](), list[list[int]]()
    for batch in loader:
        batches.append(batch)
        numbers.append(ids(batch))
        if len(batches) == 44:
            source.release.set()
            assert source.wrote_rubbish.wait(60)
    assert numbers == expected
    for batch, want in zip(batches, expected, strict=True):  # also those that were there when it wrote
        assert ids(batch) == want
        check(batch)
    assert source.times == 2
    assert loader.stats().num_hedges == 1
    assert reading_threads() == []


def test_a_pass_ends_although_a_hedged_read_hangs_for_ever(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_LATE_SECONDS", 0.05)
    source = Straggler(400, slow=0)
    loader = DataLoader(source, mesh, P("data"), batch_size=8, knobs=Knobs(threads=2, prefetch=2))
    expected = peeked(loader, 50)
    source.slow = expected[45][0]
    try:
        assert all_ids(loader) == expected
    finally:
        source.release.set()


@pytest.mark.parametrize("threads", [1, 4])
def test_forced_hedging_changes_nothing(mesh: Mesh, threads: int) -> None:
    knobs = Knobs(threads=threads, hedge_seconds=0.0)
    loader = DataLoader(Large(40), mesh, P("data"), batch_size=8, remainder="pad", knobs=knobs)
    expected = peeked(loader, 5)
    got: list[list[int]] = []
    for batch in loader:
        check(batch)
        got.append(ids(batch))
    assert got == expected
    assert loader.stats().num_hedges >= 5


def test_a_read_that_fails_while_its_hedge_succeeds_has_succeeded(mesh: Mesh) -> None:
    failed = threading.Event()

    def before(indices: np.ndarray) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("once only")

    knobs = Knobs(threads=1, hedge_seconds=0.0)
    loader = DataLoader(Numbers(16, before), mesh, P("data"), batch_size=16, knobs=knobs)
    assert all_ids(loader) == peeked(DataLoader(Numbers(16), mesh, P("data"), batch_size=16), 1)
    assert failed.is_set()


def test_a_read_that_fails_twice_has_failed(mesh: Mesh) -> None:
    def before(indices: np.ndarray) -> None:
        raise OSError("always")

    knobs = Knobs(threads=2, hedge_seconds=0.0)
    with pytest.raises(ReadError, match="OSError: always"):
        list(DataLoader(Numbers(16, before), mesh, P("data"), batch_size=16, knobs=knobs))


def test_a_slow_source_is_read_in_smaller_pieces() -> None:
    pace = fetch._Pace(1000, None)
    assert [pace.num_rows(1, first) for first in (0, 7, 2000)] == [1, 7, 1000]
    pace.saw(100, 1e-4)
    assert pace.num_rows(1, 7) == 1000
    for _ in range(200):
        pace.saw(1, 0.004)
    assert pace.num_rows(1, 7) == 2
    for _ in range(200):
        pace.saw(1, 1.0)
    assert pace.num_rows(1, 7) == 1
    assert pace.num_rows(7, 1) == 7
    assert fetch._Pace(5, None).num_rows(1, 7) == 5


@pytest.mark.parametrize(("threads", "expected"), [(1, [8, 8]), (3, [2, 2, 3, 3, 3, 3])])
def test_it_is_cut_no_finer_than_threads_need(
    threads: int, expected: list[int], mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_READ_SECONDS", 0.0)  # every source is slow
    sizes: list[int] = []
    knobs = Knobs(threads=threads, prefetch=1)
    source = Numbers(16, lambda indices: sizes.append(len(indices)))
    assert len(list(DataLoader(source, mesh, P(), batch_size=16, seed=None, knobs=knobs))) == 1
    assert sorted(sizes) == expected


def test_batches_are_read_one_after_another(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_READ_SECONDS", 0.0)
    seen: list[int] = []
    knobs = Knobs(threads=1, prefetch=3)
    source = Numbers(64, lambda indices: seen.extend(indices))
    assert len(list(DataLoader(source, mesh, P(), batch_size=16, seed=None, knobs=knobs))) == 4
    assert seen == list(range(64))


def test_when_a_read_counts_as_a_straggler() -> None:
    pace = fetch._Pace(8, None)
    for number in range(31):
        pace.saw(1, 0.1 + number / 1000)
        assert pace.hedge_seconds == float("inf")
    for _ in range(193):
        pace.saw(1, 0.2)
    assert pace.hedge_seconds == pytest.approx(0.3)
    for _ in range(320):
        pace.saw(1, 1e-4)
    assert pace.hedge_seconds == 0.05
    fixed = fetch._Pace(8, 0.7)
    for _ in range(320):
        fixed.saw(1, 1e-4)
    assert fixed.hedge_seconds == 0.7
