"""Several processes read several batches at once: the same ones, told of by few messages, each with its own error."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.data.formats.arrays.arrays import ArraySource, from_arrays
from braidax.data.knobs import Knobs
from braidax.data.loader import DataLoader
from braidax.data.multihost.hub import Hub
from braidax.errors import BraidaxError
from braidax.gang import LocalGang
from tests.support.data.jax_gang import RUN_SECONDS, jax_gang

NUM_SAMPLES = 1000
BATCH_SIZE = 24  # 42 batches an epoch, of which the last one is short
VALUES = {
    "x": np.arange(NUM_SAMPLES * 64, dtype=np.int32).reshape(NUM_SAMPLES, 64),
    "y": np.arange(NUM_SAMPLES, dtype=np.float32),
}
TAKEN = 13  # batches until a loop is left: amid those that are read at once


@pytest.fixture(scope="module")
def gang() -> Iterator[LocalGang]:
    with jax_gang(2, 2) as running:
        yield running


def shardings(form: str) -> dict[str, NamedSharding]:
    """`data`: rows over all devices. `cut`: each has a quarter of each sample. `stages`: a leaf on each process."""
    devices = np.array(jax.devices())
    if form == "stages":
        halves = [Mesh(devices[:2], ("data",)), Mesh(devices[2:], ("data",))]
        return {name: NamedSharding(mesh, P("data")) for name, mesh in zip("xy", halves, strict=True)}
    if form == "cut":
        mesh = Mesh(devices, ("seq",))
        return {"x": NamedSharding(mesh, P(None, "seq")), "y": NamedSharding(mesh, P())}
    mesh = Mesh(devices, ("data",))
    return dict.fromkeys("xy", NamedSharding(mesh, P("data" if form == "data" else None)))


def noted(patch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Notes from now on how many samples each read asks for, and each message of which round."""
    reads, messages = list[int](), list[int]()
    read, tell = ArraySource.read_slices, Hub._tell

    def reading(self: Any, indices: Any, *rest: Any) -> None:
        reads.append(len(indices))
        read(self, indices, *rest)

    def telling(self: Any, number: int, verdict: Any) -> None:
        messages.append(number)
        tell(self, number, verdict)

    patch.setattr(ArraySource, "read_slices", reading)
    patch.setattr(Hub, "_tell", telling)
    return reads, messages


def differing(batch: Any, indices: np.ndarray) -> list[str]:
    """Returns what this process's shards hold else than NumPy's batch does."""
    found: list[str] = []
    for name, values in VALUES.items():
        whole = np.zeros((BATCH_SIZE, *values.shape[1:]), values.dtype)
        whole[: len(indices)] = values[indices]
        for shard in batch[name].addressable_shards:
            if not np.array_equal(np.asarray(shard.data), whole[shard.index]):
                found.append(f"{name}{shard.index}")
    return found


def gone_through(comm: Any, form: str, alone: int | None) -> dict[str, Any]:
    """Goes through an epoch and a half, and leaves the loop once. **Arguments:** `alone`: who reads batch by batch."""
    knobs = Knobs(prefetch=1) if comm.rank == alone else Knobs()
    step = jax.jit(lambda batch: batch["x"].sum(), out_shardings=NamedSharding(shardings("data")["x"].mesh, P()))
    found: dict[str, Any] = {"wrong": [], "cursors": []}
    with (
        DataLoader(
            from_arrays(VALUES), None, shardings(form), batch_size=BATCH_SIZE, seed=5, remainder="pad", knobs=knobs
        ) as loader,
        pytest.MonkeyPatch.context() as patch,
    ):
        reads, messages = noted(patch)
        coming = iter(loader.peek(2 * 42))
        for num_taken in (TAKEN, 42, 42):
            for number, batch in enumerate(loader, start=1):
                found["wrong"] += differing(batch, next(coming))
                found["cursors"].append(tuple(loader.cursor))
                if form == "data":
                    jax.block_until_ready(step(batch))  # which waits for the other process
                if number == num_taken:
                    break
        found["copied"] = sum(len(leaf.copies) for leaf in loader._plan.at_once.leaves)
        return {**found, "most": max(reads, default=0), "num_messages": len(messages)}


@pytest.mark.parametrize("form", ["data", "cut", "stages", "whole"])
def test_batches_are_those_of_numpy(gang: LocalGang, form: str) -> None:
    """Also where a loop was left amid those that were read at once, and at the short end of an epoch."""
    told = gang.run(gone_through, form, None, timeout_seconds=RUN_SECONDS)
    each = {"data": 12, "cut": 24, "stages": 24, "whole": 24}[form]
    for answer in told:
        assert answer["wrong"] == []
        assert len(answer["cursors"]) == 84
        assert answer["cursors"] == told[0]["cursors"]
        assert answer["cursors"][TAKEN] == (5, 0, (TAKEN + 1) * BATCH_SIZE)
        assert answer["most"] == 8 * each
        assert answer["num_messages"] <= 30  # of 84 batches
        assert form != "cut" or not answer["copied"]


@pytest.mark.parametrize("alone", [0, 1])
def test_a_process_may_read_one_by_one_beside_others(gang: LocalGang, alone: int) -> None:
    told = gang.run(gone_through, "data", alone, timeout_seconds=RUN_SECONDS)
    assert [answer["wrong"] for answer in told] == [[], []]
    assert [answer["most"] for answer in told] == [12 if rank == alone else 96 for rank in range(2)]
    assert told[0]["cursors"] == told[1]["cursors"]


def failing(comm: Any, number: int, row: int) -> tuple[str, str, int]:
    """Returns what was raised, and after how many batches, where a record of one cannot be read."""
    values = np.zeros((NUM_SAMPLES, 16), np.int64)
    loader = DataLoader(from_arrays({"x": values}), None, shardings("data")["x"], batch_size=BATCH_SIZE)
    values[loader.peek(number + 1)[number][row]] = 2**40
    got = 0
    try:
        for _ in loader:
            got += 1
    except BraidaxError as error:
        return type(error).__name__, str(error), got
    finally:
        loader.close()
    return "", "", got


@pytest.mark.parametrize(("number", "row"), [(20, 0), (20, 23), (1, 0), (1, 23)])  # amid those read at once, and first
def test_an_error_is_raised_on_all_at_its_batch(gang: LocalGang, number: int, row: int) -> None:
    told = gang.run(failing, number, row, timeout_seconds=RUN_SECONDS)
    reader = row // 12
    assert [got for _, _, got in told] == [number, number]
    assert told[reader][0] == "RecordError"
    assert "leaf 'x' holds 1099511627776" in told[reader][1]
    assert told[1 - reader][0] == "CallFailed"
    assert f"process {reader} failed: RecordError" in told[1 - reader][1]


def leaving(comm: Any, leaver: int) -> tuple[str, int]:
    """Returns what was raised, and after how many batches, where a process leaves its loop early."""
    with DataLoader(from_arrays(VALUES), None, shardings("data"), batch_size=BATCH_SIZE, seed=5) as loader:
        got = 0
        try:
            for _ in loader:
                got += 1
                if comm.rank == leaver and got == TAKEN:
                    break
        except BraidaxError as error:
            return type(error).__name__, got
        return "", got


@pytest.mark.parametrize("leaver", [0, 1])
def test_nobody_waits_for_a_process_that_leaves(gang: LocalGang, leaver: int) -> None:
    """The other one gets what both have read, and no more."""
    told = gang.run(leaving, leaver, timeout_seconds=RUN_SECONDS)
    assert told[leaver] == ("", TAKEN)
    kind, got = told[1 - leaver]
    assert kind == "PeerLost"
    assert TAKEN <= got <= TAKEN + 24
