"""The same cursor gives the same bits: whatever the threads, processes and hedges, and whatever fails on the way."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from braidax.data.fetching import fetch
from braidax.data.knobs import Knobs
from braidax.data.loader import DataLoader
from braidax.data.sampling.order import Cursor
from braidax.data.source import Source
from braidax.data.workers.processes import InProcesses, in_processes
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children

NUM_SAMPLES = 75
SPECS = (
    (P("data"), P("data")),
    (P("data"), P("data", None, "model")),
    (P(("data", "model")), P(None, None, "model")),
    (P(), P("model")),
)


def sample_values(indices: np.ndarray, seed: int | None, epoch: int) -> dict[str, np.ndarray]:
    """What samples hold: their number, and something random that depends on (seed, epoch, number) alone."""
    noise = [np.random.default_rng([seed or 0, epoch, number]).random((2, 4), np.float32) for number in indices]
    half = np.asarray(indices)[:, None] * 3 + epoch
    return {
        "id": np.asarray(indices, np.int32),
        "noise": np.asarray(noise, np.float32).reshape(-1, 2, 4),
        "half": np.asarray(half % 256, jax.dtypes.bfloat16),
    }


class Faulty(Source):
    """Reads take as long as chance has it. Some fail, but never the second of two equal ones; some kill their process.

    **Arguments:** `slow_seconds`: the longest that a read takes. `failing`: the fraction of reads that fail. `deaths`:
    a folder; for each file "order…" in it one read ends its process.
    """

    def __init__(self, *, slow_seconds: float = 0.0, failing: float = 0.0, deaths: Path | None = None) -> None:
        self.slow_seconds = slow_seconds
        self.failing = failing
        self.deaths = deaths
        self.drawn: tuple[int | None, int] = (None, 0)
        self.failed: set[Any] = set()
        self.lock = threading.Lock()

    @property
    def sample_spec(self) -> Any:
        values = sample_values(np.zeros(1, np.int64), 0, 0)
        return {name: jax.ShapeDtypeStruct(value.shape[1:], value.dtype) for name, value in values.items()}

    def __len__(self) -> int:
        return NUM_SAMPLES

    def read(self, indices: np.ndarray, out: Any) -> None:
        chance = random.Random()  # a source may be as unsteady as it likes: what it reads is not
        for value in out.values():
            value[...] = 99  # what is not overwritten shows
        time.sleep(self.slow_seconds * chance.random() ** 3)
        if self.deaths is not None and chance.random() < 0.3:
            self._die()
        if chance.random() < self.failing or (self.failing and not self.failed):
            self._fail((*self.drawn, *indices.tolist()))
        for name, value in sample_values(indices, *self.drawn).items():
            out[name][...] = value

    def _die(self) -> None:
        assert self.deaths is not None
        for order in self.deaths.glob("order*"):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                order.rename(self.deaths / f"died {os.getpid()}")
                os.kill(os.getpid(), signal.SIGKILL)

    def _fail(self, what: Any) -> None:
        with self.lock:
            if what in self.failed:
                return
            self.failed.add(what)
        raise OSError("connection reset")

    def at(self, seed: int | None, epoch: int) -> "Faulty":
        other = Faulty(slow_seconds=self.slow_seconds, failing=self.failing, deaths=self.deaths)
        other.drawn, other.failed, other.lock = (seed, epoch), self.failed, self.lock
        return other

    def describe(self) -> Mapping[str, str]:
        return {}


@pytest.fixture(scope="module", autouse=True)
def small_reads() -> Iterator[None]:
    """Cuts batches into reads of a few samples, as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "_READ_BYTES", 200)
        yield


@st.composite
def loads(draw: st.DrawFn) -> dict[str, Any]:
    """A mesh, specs, a batch size, and a cursor somewhere in the first two epochs."""
    shape = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (2, 4), (8, 1)]))
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("data", "model"))
    rows, noise = draw(st.sampled_from(SPECS))
    batch_size = 8 * draw(st.integers(1, 4))
    remainder = draw(st.sampled_from(["drop", "pad"]))
    positions = range(0, NUM_SAMPLES - (batch_size - 1 if remainder == "drop" else 0), batch_size)
    return {
        "mesh": mesh,
        "specs": {"id": rows, "noise": noise, "half": rows},
        "batch_size": batch_size,
        "remainder": remainder,
        "cursor": Cursor(
            draw(st.sampled_from([None, 0, 7])), draw(st.integers(0, 1)), draw(st.sampled_from(positions))
        ),
    }


def expected_batches(load: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """What the batches from the cursor to the end of the second epoch hold, computed without any loader's threads."""
    loader = make_loader(Faulty(), load)
    left = 2 * loader.batches_per_epoch - load["cursor"].epoch * loader.batches_per_epoch
    left -= load["cursor"].position // load["batch_size"]
    this_epoch = loader.batches_per_epoch - load["cursor"].position // load["batch_size"]
    expected: list[dict[str, np.ndarray]] = []
    for number, indices in enumerate(loader.peek(left)):
        epoch = load["cursor"].epoch + (number >= this_epoch)
        values = sample_values(indices, load["cursor"].seed, epoch)
        missing = load["batch_size"] - len(indices)
        padded = {
            name: np.concatenate([value, np.zeros((missing, *value.shape[1:]), value.dtype)])
            for name, value in values.items()
        }
        if load["remainder"] == "pad":
            padded["mask"] = np.arange(load["batch_size"]) < len(indices)
        expected.append(padded)
    return expected


def make_loader(source: Source, load: dict[str, Any], **knobs: Any) -> DataLoader:
    loader = DataLoader(
        source,
        load["mesh"],
        load["specs"],
        batch_size=load["batch_size"],
        epochs=2,
        remainder=load["remainder"],
        knobs=Knobs(**knobs),
    )
    loader.cursor = load["cursor"]
    return loader


def check(loader: DataLoader, load: dict[str, Any]) -> None:
    expected = expected_batches(load)
    batches = list(loader)  # all kept, so that memory which is used too early would show
    assert len(batches) == len(expected) > 0
    for batch, want in zip(batches, expected, strict=True):
        assert batch.keys() == want.keys()
        for name, value in want.items():
            assert np.asarray(batch[name]).tobytes() == value.tobytes(), name
    assert loader.cursor == Cursor(load["cursor"].seed, 2, 0)


@settings(max_examples=8)
@given(loads(), st.sampled_from([1, 4, 16]), st.sampled_from([None, 0.0, 1e-3]), st.integers(1, 5))
def test_threads_hedges_and_slow_reads_change_no_bit(
    load: dict[str, Any], threads: int, hedge_seconds: float | None, prefetch: int
) -> None:
    source = Faulty(slow_seconds=0.01)
    check(make_loader(source, load, threads=threads, hedge_seconds=hedge_seconds, prefetch=prefetch), load)


@settings(max_examples=6)
@given(loads(), st.sampled_from([1, 4, 16]))
def test_a_read_that_fails_once_and_is_hedged_changes_no_bit(load: dict[str, Any], threads: int) -> None:
    source = Faulty(slow_seconds=0.003, failing=0.5)
    loader = make_loader(source, load, threads=threads, hedge_seconds=0.0)
    check(loader, load)
    assert source.failed


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deaths")


@pytest.fixture(scope="module")
def processes(deaths: Path) -> Iterator[InProcesses]:
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch, *LOAD_AND_SAVE)
        source = in_processes(Faulty(slow_seconds=0.003, deaths=deaths), num_workers=2, timeout_seconds=60)
        yield source
        source.close()
    assert list(deaths.glob("died *"))


@settings(max_examples=3)
@given(load=loads(), threads=st.sampled_from([1, 4, 16]), hedge_seconds=st.sampled_from([None, 0.0]))
def test_processes_and_their_deaths_change_no_bit(
    processes: InProcesses, deaths: Path, load: dict[str, Any], threads: int, hedge_seconds: float | None
) -> None:
    (deaths / "order").touch()
    check(make_loader(processes, load, threads=threads, hedge_seconds=hedge_seconds), load)
