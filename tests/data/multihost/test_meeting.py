"""Processes that load together: they mean the same, end together, and fail together, each knowing why."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from braidax.data.knobs import Knobs
from braidax.data.loader import DataLoader
from braidax.data.multihost import reading_again
from braidax.data.sampling.order import Cursor
from braidax.data.storage.progress import Progress
from braidax.errors import BraidaxError, CallFailed, PeerLost
from braidax.gang import LocalGang
from tests.support.data.jax_gang import RUN_SECONDS, Counting, CountingSliced, jax_gang
from tests.support.data.numbered import Numbers

SECONDS = 20.0
KNOBS = Knobs(timeout_seconds=SECONDS)


@pytest.fixture(scope="module")
def gang() -> Iterator[LocalGang]:
    with jax_gang(3, 2) as running:
        yield running


def told(gang: LocalGang, fn: Any, *args: Any) -> list[tuple[str, str, float]]:
    """Returns by process what it raised, in words, and after how many seconds."""
    return gang.run(_caught, fn, args, timeout_seconds=RUN_SECONDS)


def _caught(comm: Any, fn: Any, args: Any) -> tuple[str, str, float]:
    begun = time.monotonic()
    try:
        fn(comm.rank, *args)
    except BraidaxError as error:
        check_fields(error)
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", time.monotonic() - begun


def check_fields(error: BraidaxError) -> None:
    """Checks that an error that comes from another process says which and where, and shows its traceback."""
    if isinstance(error, CallFailed | PeerLost):
        assert (error.rank, error.host) == (int(str(error).split()[1]), socket.gethostname())
    if isinstance(error, CallFailed):
        assert error.traceback.startswith(("Traceback", "…"))
        assert "Error: " in error.traceback.splitlines()[-1]


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",))


def differing(rank: int, what: str) -> None:
    source, specs, batch_size, devices, seed = Numbers(60), P("data"), 12, mesh(), 0
    if rank == 1:
        if what == "length":
            source = Numbers(61)
        if what == "spec":
            specs = P()
        if what == "batch":
            batch_size = 6
        if what == "order":
            devices = Mesh(np.array(jax.devices())[::-1], ("data",))
        if what == "seed":
            seed = 7
    with DataLoader(source, devices, specs, batch_size=batch_size, seed=seed, knobs=KNOBS) as loader:
        for _ in loader:
            pass


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("length", "differ in the number of samples: process 0, 2: 60; process 1: 61"),
        ("spec", "differ in the sharding of leaf ['id']: process 0, 2: P('data',) on the mesh {'data': 6}"),
        ("batch", "differ in batch_size=: process 0, 2: 12; process 1: 6"),
        ("order", "of the devices 0,1,"),
        ("seed", "differ in where they begin: process 0, 2: Cursor(seed=0"),
    ],
)
def test_what_differs_is_shown_on_all_processes(gang: LocalGang, what: str, shown: str) -> None:
    for kind, text, seconds in told(gang, differing, what):
        assert kind == "ArgumentError"
        assert shown in text
        assert seconds < SECONDS / 2


def missing_file(rank: int, folder: str) -> None:
    path = Path(folder) / f"host-{rank}" / "numbers.npy"
    DataLoader(str(path), mesh(), P("data"), batch_size=6, knobs=KNOBS).close()


def test_a_file_that_one_host_lacks_is_an_error_on_all(gang: LocalGang, tmp_path: Path) -> None:
    for rank in (0, 2):
        (tmp_path / f"host-{rank}").mkdir()
        np.save(tmp_path / f"host-{rank}" / "numbers.npy", np.zeros((12, 3), np.float32))
    first, second, third = told(gang, missing_file, str(tmp_path))
    assert second[0] == "FormatError"
    assert "host-1" in second[1]
    for kind, text, _ in (first, third):
        assert kind == "CallFailed"
        assert "process 1 cannot load this data: FormatError" in text
        assert "host-1" in text


def indexing(rank: int) -> None:
    """Process 1 makes an index before it makes its loader, which takes longer than the others would wait."""
    if rank == 1:
        begun = time.monotonic()
        with Progress("index of", "x", 1000) as work:
            while (elapsed := time.monotonic() - begun) < 5.5:
                work.show(0, int(100 * elapsed))
                time.sleep(0.05)  # what it costs to read on
    with DataLoader(Numbers(60), mesh(), P("data"), batch_size=12, knobs=Knobs(timeout_seconds=4.0)) as loader:
        assert sum(1 for _ in loader) == 5


def test_a_process_that_makes_an_index_is_waited_for(gang: LocalGang) -> None:
    assert [(kind, text) for kind, text, _ in told(gang, indexing)] == [("", "")] * 3


class Broken(Numbers):
    """Cannot read one of its records."""

    def __init__(self, num_samples: int, record: int) -> None:
        super().__init__(num_samples)
        self._record = record

    def read(self, indices: np.ndarray, out: Any) -> None:
        if self._record in indices:
            raise OSError(f"record {self._record} is gone")
        super().read(indices, out)


def failing(rank: int, spec: P) -> None:
    """Raises with where it had come: process 2 reads record 21 in the second batch, by either spec."""
    source = Broken(60, 21) if rank == 2 else Numbers(60)
    positions: list[int] = []
    try:
        with DataLoader(source, mesh(), spec, batch_size=12, seed=None, knobs=KNOBS) as loader:
            for batch in loader:
                positions.append(loader.cursor.position)
                jax.block_until_ready(batch)
    except BraidaxError as error:
        raise type(error)(f"{error} | after {positions}", *error.args[1:]) from error


@pytest.mark.parametrize("spec", [P("data"), P()])
def test_an_error_on_one_process_is_raised_on_all_at_the_same_batch(gang: LocalGang, spec: P) -> None:
    first, second, third = told(gang, failing, spec)
    assert third[0] == "ReadError"
    assert "record 21 is gone" in third[1]
    assert third[1].endswith("| after [12]")
    for kind, text, seconds in (first, second):
        assert kind == "CallFailed"
        assert text.startswith("process 2 failed: ReadError: ")
        assert "record 21 is gone" in text
        assert text.endswith("| after [12]")
        assert seconds < SECONDS / 2


def exchanging(rank: int) -> None:
    """The same where devices exchange: the batch that fails is loaded a step ahead, and raised in its place."""
    from braidax.data.sharding import load_sharding

    small = load_sharding.SMALL_BYTES
    load_sharding.SMALL_BYTES = 1
    try:
        failing(rank, P())
    finally:
        load_sharding.SMALL_BYTES = small


def test_an_error_found_ahead_is_raised_in_its_place(gang: LocalGang) -> None:
    # cut by rows, process 2 reads the last third of each batch
    for kind, text, seconds in told(gang, exchanging):
        assert kind in ("CallFailed", "ReadError")
        assert "record 21 is gone" in text
        assert text.endswith("| after [12]")
        assert seconds < SECONDS / 2


def stopping(rank: int) -> None:
    """Leaves a pass early, begins another, goes back by the cursor: as a training loop does."""
    loader = DataLoader(Numbers(60), mesh(), P("data"), batch_size=12, epochs=1, knobs=KNOBS)
    with loader:
        for _ in loader:
            if loader.cursor.position == 24:
                break
        assert [np.asarray(batch["id"].addressable_shards[0].data).size for batch in loader] == [2] * 3
        loader.cursor = Cursor(0, 3, 36)
        assert sum(1 for _ in loader) == 2
        assert loader.cursor == Cursor(0, 4, 0)
        group = loader._group
        assert group is not None
        if rank == 0:  # which has dropped what was said before the passes that are over
            assert not group._places.below("pass-0")
            assert not group._places.below("pass-1")
        assert len(group._places.below("pass-2/start/said")) == 3
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith(("braidax-read", "braidax-rounds"))]


def test_a_pass_may_be_left_and_begun_anew(gang: LocalGang) -> None:
    assert [kind for kind, _, _ in told(gang, stopping)] == [""] * 3


class Diverging(Numbers):
    """Its record 30 is another one on one host."""

    def __init__(self, num_samples: int, shift: float) -> None:
        super().__init__(num_samples)
        self._shift = shift

    def read(self, indices: np.ndarray, out: Any) -> None:
        super().read(indices, out)
        out["x"][indices == 30, 2] += self._shift


def diverging(rank: int, every: int | None, shift: float) -> None:
    source = Diverging(96, shift if rank == 1 else 0.0)
    with DataLoader(source, mesh(), P(), batch_size=12, seed=None, knobs=KNOBS, checksum_every=every) as loader:
        for _ in loader:
            position = loader.cursor.position
            if shift == 0.0 or every is None:
                continue
            assert position <= 48, "batch 2 holds record 30; two batches later it is known"


def test_replicas_that_differ_are_found(gang: LocalGang) -> None:
    for kind, text, _ in told(gang, diverging, 2, 0.25):
        assert kind == "DataError"
        assert text.startswith("batch 2 of this pass: leaf ['x'][0:12, 0:6] differs between process 0, 2 and process 1")


@pytest.mark.parametrize(("every", "shift"), [(1, 0.0), (2, 0.0), (None, 0.25)])
def test_replicas_that_agree_or_are_not_compared_pass(gang: LocalGang, every: int | None, shift: float) -> None:
    assert [(kind, text) for kind, text, _ in told(gang, diverging, every, shift)] == [("", "")] * 3


class Slow(Counting):
    """Takes its time for each sample."""

    def __init__(self, num_samples: int, seconds: float) -> None:
        super().__init__({"leaf0": jax.ShapeDtypeStruct((4,), np.int32)}, num_samples)
        self._seconds = seconds

    def read(self, indices: np.ndarray, out: Any) -> None:
        time.sleep(self._seconds * len(indices))
        super().read(indices, out)


def choosing(rank: int, seconds: float, redundancy: float) -> None:
    """A batch of 12 x 16 bytes that all processes hold."""
    source = Slow(36, seconds)
    with DataLoader(source, mesh(), P(), batch_size=12, knobs=KNOBS) as loader:
        assert loader.explain().redundancy == redundancy
        source.forget()
        for indices, batch in zip(loader.peek(3), loader, strict=True):
            for shard in batch["leaf0"].addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), source.values("leaf0", indices))
    assert len(source.records) == 36 * redundancy / 3


@pytest.mark.parametrize(("seconds", "redundancy"), [(0.05, 1.0), (0.0, 3.0)])
def test_small_leaves_are_exchanged_where_reading_them_again_is_slow(
    gang: LocalGang, seconds: float, redundancy: float
) -> None:
    assert [(kind, text) for kind, text, _ in told(gang, choosing, seconds, redundancy)] == [("", "")] * 3


class Stored(CountingSliced):
    """Large samples that can be read in part: at a price for each, and others where files differ."""

    def __init__(self, seconds: float, differs: int) -> None:
        super().__init__({"leaf0": jax.ShapeDtypeStruct((16384,), np.int32)}, 36)
        self._seconds, self._differs = seconds, differs

    def read(self, indices: np.ndarray, out: Any) -> None:
        self.read_slices(indices, [((0, 16384),)], [out["leaf0"]])

    def read_slices(self, indices: np.ndarray, boxes: Any, out: Any) -> None:
        time.sleep(self._seconds * len(indices))
        super().read_slices(indices, boxes, out)
        for place in out:
            place += self._differs


def choosing_for_large(rank: int, seconds: float, differs: bool, redundancy: float) -> None:
    """A batch of 12 x 64 KiB that all processes hold; to exchange it takes a second."""
    exchange = reading_again._exchange_seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_again, "_exchange_seconds", lambda plan: exchange(plan) and 1.0)
        source = Stored(seconds, rank * differs)
        with DataLoader(source, mesh(), P(), batch_size=12, knobs=KNOBS) as loader:
            found = loader.explain()
            assert found.redundancy == redundancy
            assert ("quicker than to exchange it" in found.leaves[0].why) == (redundancy > 1)
            source.forget()
            for indices, batch in zip(loader.peek(3), loader, strict=True):
                for shard in batch["leaf0"].addressable_shards if not differs else ():
                    np.testing.assert_array_equal(np.asarray(shard.data), source.values("leaf0", indices))
        assert len(source.records) == 36 * redundancy / 3


# Small leaves, too, are exchanged where reading them again is slow: by day above.
@pytest.mark.parametrize(
    ("seconds", "differs", "redundancy"),
    [(0.0, False, 3.0), pytest.param(0.2, False, 1.0, marks=pytest.mark.slow), (0.0, True, 1.0)],
)
def test_what_is_stored_is_read_again_where_that_is_quicker_and_the_same(
    gang: LocalGang, seconds: float, differs: bool, redundancy: float
) -> None:
    """0.2 s a sample: 0.8 s and the exchange, or 2.4 s. Where files differ, each is read by one process."""
    assert [(kind, text) for kind, text, _ in told(gang, choosing_for_large, seconds, differs, redundancy)] == [
        ("", "")
    ] * 3


def test_what_a_transform_makes_is_read_once(gang: LocalGang) -> None:
    assert [(kind, text) for kind, text, _ in told(gang, choosing_for_made)] == [("", "")] * 3


def choosing_for_made(rank: int) -> None:
    """Large whole samples, which cost nothing: code may draw numbers of its own for them on each process."""
    source = Counting({"leaf0": jax.ShapeDtypeStruct((16384,), np.int32)}, 36)
    with DataLoader(source, mesh(), P(), batch_size=12, knobs=KNOBS) as loader:
        assert loader.explain().redundancy == 1.0


def outsider(rank: int) -> None:
    """A mesh of the first two processes: the third makes the same loader, and its arrays have no shards."""
    devices = Mesh(np.array(jax.devices())[:4], ("data",))
    source = Counting({"leaf0": jax.ShapeDtypeStruct((5,), np.float32)}, 24)
    with DataLoader(source, devices, P("data"), batch_size=8, knobs=KNOBS) as loader:
        for batch in loader:
            assert batch["leaf0"].shape == (8, 5)
            assert len(batch["leaf0"].addressable_shards) == (0 if rank == 2 else 2)
    assert source.num_bytes["leaf0"] == (0 if rank == 2 else 3 * 4 * 20)


def test_a_process_without_devices_reads_nothing(gang: LocalGang) -> None:
    assert [(kind, text) for kind, text, _ in told(gang, outsider)] == [("", "")] * 3


def only_here(rank: int) -> None:
    """Each process has a loader of its own devices only; the others need not know."""
    mine = Mesh(np.array(jax.local_devices()), ("data",))
    for _ in range(rank + 1):
        with DataLoader(Numbers(8), mine, P("data"), batch_size=4, knobs=KNOBS) as loader:
            assert sum(len(batch["id"]) for batch in loader) == 8


def test_a_loader_of_local_devices_is_alone(gang: LocalGang) -> None:
    assert [(kind, text) for kind, text, _ in told(gang, only_here)] == [("", "")] * 3


def pausing(rank: int) -> None:
    """All pause for longer than the limit, and one is further ahead than the others."""
    knobs = Knobs(timeout_seconds=4.0, prefetch=6 if rank == 1 else 1)
    with DataLoader(Numbers(60), mesh(), P("data"), batch_size=6, knobs=knobs) as loader:
        for _ in loader:
            if loader.cursor.position == 6:
                threading.Event().wait(5.0)


def test_a_pause_of_the_loop_is_no_wait(gang: LocalGang) -> None:
    assert [(kind, text) for kind, text, _ in told(gang, pausing)] == [("", "")] * 3


_KEPT: list[Any] = []


def late(rank: int, is_kept: bool) -> None:
    """Process 1 takes one batch; then it keeps the pass, or leaves it."""
    knobs = Knobs(timeout_seconds=2.0)
    loader = DataLoader(Numbers(60), mesh(), P("data"), batch_size=6, knobs=knobs)
    batches = iter(loader)
    next(batches)
    if rank != 1:
        for _ in batches:
            pass
    elif is_kept:
        _KEPT.append(batches)


def let_go(comm: Any) -> None:
    while _KEPT:
        _KEPT.pop().close()


def test_a_process_that_stays_away_is_named(gang: LocalGang) -> None:
    first, second, third = told(gang, late, True)
    assert second[0] == ""
    for kind, text, seconds in (first, third):
        assert kind == "WaitTimeout"
        assert "waited for process 1 up to the limit" in text
        assert 2.0 <= seconds < SECONDS
    gang.run(let_go, timeout_seconds=RUN_SECONDS)


def test_a_process_that_leaves_a_pass_is_named_before_the_limit(gang: LocalGang) -> None:
    first, second, third = told(gang, late, False)
    assert second[0] == ""
    for kind, text, seconds in (first, third):
        assert kind == "PeerLost"
        assert text.startswith("process 1 has left this pass over the data, or has ended; expected every process to")
        assert seconds < SECONDS / 2
