"""OpenPlaces processes save one tree, and restore it in other numbers: bit for bit, each its part, all or none."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint import Checkpointer, Every, copied, restore
from braidax.checkpoint.format import folders, loading
from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.checkpoint.format.reading import Reader, read_manifest
from braidax.checkpoint.places import restoring as restoring_module
from braidax.checkpoint.processes import CoordinationChannel, Processes
from braidax.comm import Communicator
from braidax.connections.coordination import Coordination
from braidax.errors import BraidaxError, CallFailed, CheckpointError, PeerLost, WaitTimeout
from braidax.gang import LocalGang
from tests.support.checkpoint.leaves import ROWS, own, tree, whole
from tests.support.checkpoint.saving import Longer, names, read_all
from tests.support.checkpoint.told import told
from tests.support.comm.ranks import in_turns

SECONDS = 20.0


def saving(comm: Communicator, folder: Path) -> str:
    with Checkpointer(folder, Every(2), timeout_seconds=SECONDS) as saver:
        assert saver.restore(0) == 0
        # The state is donated at once, and the bits are those from before.
        step = jax.jit(lambda state: jax.tree.map(lambda x: x + x.dtype.type(1), state), donate_argnums=0)
        state = tree("saved", whole())
        donated = {name: state[name] for name in ("rows", "replicated")}
        saver.update(state | own(comm.rank))
        saver.update(state | donated | own(comm.rank))
        for _ in range(3):
            donated = step(donated)
        saver.wait()
        saver.close()
        return ",".join(names(folder))


def restoring(comm: Communicator, folder: Path) -> str:
    reads: list[int] = []

    class Counted(Reader):
        def __exit__(self, *arguments: Any) -> None:
            super().__exit__(*arguments)
            reads.append(self.num_bytes)

    loading.Reader = Counted
    like = tree("otherwise", {name: np.zeros_like(value) for name, value in whole().items()}) | own(9)
    wanted = tree("otherwise", whole())
    with Checkpointer(folder, Every(2), timeout_seconds=SECONDS) as saver:
        got = saver.restore(like)
        assert saver.num_updates == 2
    for name, want in wanted.items():
        pair = (jax.random.key_data(got[name]), jax.random.key_data(want)) if name == "keys" else (got[name], want)
        assert got[name].sharding == want.sharding, name
        assert len(pair[0].addressable_shards) == len(pair[1].addressable_shards)
        for ours, theirs in zip(pair[0].addressable_shards, pair[1].addressable_shards, strict=True):
            assert np.asarray(ours.data).tobytes() == np.asarray(theirs.data).tobytes(), name
    assert (got["cursor"], got["numpy"].tolist(), got["local"].tolist()) == ((1, 0), [0, 0, 0], [0, 0])
    only = restore(folder, {"rows": like["rows"]}, only=("rows",), timeout_seconds=SECONDS)
    assert jnp.array_equal(only.tree["rows"], wanted["rows"])
    return json.dumps(reads)


def test_four_processes_save_and_others_restore(tmp_path: Path, two: LocalGang, four: LocalGang) -> None:
    assert told(four, saving, tmp_path) == ["step-00000002"] * 4
    folder = tmp_path / "step-00000002"
    assert names(folder) == sorted(
        name for process in range(4) for name in (data_file(process), manifest_file(process))
    )
    # Nothing is written twice, and none writes much more than others.
    sizes = [sum(tensor.num_bytes for tensor in read_manifest(folder, process).tensors) for process in range(4)]
    assert sum(sizes) == sum(np.asarray(value).nbytes for value in whole().values()) + 2 * 4 + 3 * 8
    assert max(sizes) - min(sizes) < 2048
    # One process, without any of that.
    content = read_all(folder)
    for name, value in whole().items():
        assert content[name].tobytes() == np.asarray(value).tobytes(), name
    for gang in (two, four):
        found = told(gang, restoring, tmp_path)
        for words in found:
            num_bytes = json.loads(words)
            # What is split is read by those that need it, in parts as it was written, and only small leaves by all.
            assert 0 < num_bytes[0] <= sum(sizes) / gang.size + 2048
            assert num_bytes[1] == ROWS * 16 * 4 / gang.size


def in_stages(kind: str) -> Longer:
    """A state of a pipeline over two processes, of each leaf what this one has; 20 rows in two ways of dividing."""
    devices = np.array(jax.devices())
    first = NamedSharding(Mesh(devices[:2], ("data",)), P())
    last = SingleDeviceSharding(devices[5])
    begins = {"saved": (0, 7, 12, 20), "otherwise": (0, 12, 13, 15, 20)}[kind]
    homes = {"saved": (first, last, first), "otherwise": (last, last, first, last)}[kind]
    rows = np.arange(20 * 3, dtype=np.float32).reshape(20, 3)
    fill = float(kind == "saved")

    def at(value: np.ndarray, sharding: Any) -> jax.Array:
        parts = [jax.device_put(value * value.dtype.type(fill), device) for device in sharding.addressable_devices]
        return jax.make_array_from_single_device_arrays(value.shape, sharding, parts, dtype=value.dtype)

    pairs = zip(begins[:-1], begins[1:], homes, strict=True)
    layers = tuple(at(rows[begin:end], home) for begin, end, home in pairs)
    own = np.random.default_rng(0).integers(1, 99, (4, 2), np.uint32)
    arrays = {"layers": layers, "key": jax.random.wrap_key_data(at(own, first))}
    arrays |= {"head": at(np.arange(5, dtype=np.float32), last), "step": at(np.array(7, np.int32), first)}
    return Longer(arrays, {"arrays/layers": (20, 3)})


def saving_stages(comm: Communicator, folder: Path) -> str:
    with Checkpointer(folder, Every(1), timeout_seconds=SECONDS, prepare=copied) as saver:
        saver.update(in_stages("saved"))
    return str(sum(tensor.num_bytes for tensor in read_manifest(folder / "step-00000001", comm.rank).tensors))


def restoring_stages(comm: Communicator, folder: Path) -> str:
    found = restore(folder, in_stages("otherwise"), timeout_seconds=SECONDS).tree
    for got, like in zip(jax.tree.leaves(found), jax.tree.leaves(in_stages("otherwise")), strict=True):
        assert (got.sharding, got.shape, got.dtype) == (like.sharding, like.shape, like.dtype)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    like = jax.ShapeDtypeStruct((20, 3), np.float32, sharding=NamedSharding(mesh, P(None, None)))
    whole = restore(folder, Longer({"layers": like}), only="arrays/layers", timeout_seconds=SECONDS).tree
    key = found.arrays.pop("key")
    here = {
        str(at): np.asarray(leaf.addressable_data(0)).tolist()
        for at, leaf in enumerate(jax.tree.leaves(found.arrays))
        if leaf.addressable_shards
    }
    here["key"] = np.asarray(jax.random.key_data(key).addressable_data(0)).tolist() if comm.rank == 0 else []
    return json.dumps([here, np.asarray(whole.arrays["layers"].addressable_data(0)).tolist()])


def test_each_process_saves_and_restores_the_stages_that_it_has(tmp_path: Path, two: LocalGang) -> None:
    # Of 20 rows of 12 bytes process 0 has 15, a step and the keys; process 1 has 5 rows and the head.
    assert told(two, saving_stages, tmp_path) == [str(15 * 12 + 4 + 32), str(5 * 12 + 20)]
    rows = np.arange(20 * 3, dtype=np.float32).reshape(20, 3)
    content = read_all(tmp_path / "step-00000001")
    np.testing.assert_array_equal(content["arrays/layers"], rows)
    assert content.keys() == {f"arrays/{name}" for name in ("layers", "head", "step", "key")}
    first, last = map(json.loads, told(two, restoring_stages, tmp_path))
    keys = np.random.default_rng(0).integers(1, 99, (4, 2), np.uint32).tolist()
    assert first == [{"3": rows[13:15].tolist(), "5": 7, "key": keys}, rows.tolist()]
    ours = {
        "1": rows[:12].tolist(),
        "2": rows[12:13].tolist(),
        "4": rows[15:].tolist(),
        "0": [0, 1, 2, 3, 4],
        "key": [],
    }
    assert last == [ours, rows.tolist()]


def a_tree(fill: float) -> dict[str, Any]:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P("a"))
    return {"x": jax.make_array_from_callback((8, 64), sharding, lambda index: np.full((8, 64), fill, "f4")[index])}


def failing(comm: Communicator, folder: Path, who: int) -> list[str]:
    """Saves three times; the disk of one process is full at the second."""
    found: list[str] = []
    fsync = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with Checkpointer(folder, Every(1), timeout_seconds=SECONDS) as saver:
        for number in (1, 2, 3):
            os.fsync = full if comm.rank == who and number == 2 else fsync
            saver.update(a_tree(number))
            try:
                saver.close() if number == 3 else saver.save(a_tree(number))
            except BraidaxError as error:
                found.append(str(error))
                cause = error.__cause__
                if comm.rank != who:
                    assert isinstance(cause, CallFailed)
                    assert (cause.rank, "No space left on device" in cause.traceback) == (who, True)
            finally:
                os.fsync = fsync
    return found


class Silent:
    """Of a coordination service, in which nobody else says anything."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        time.sleep(0.001)
        raise JaxRuntimeError("DEADLINE_EXCEEDED")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_one_that_leaves_waits_for_nobody() -> None:
    board = CoordinationChannel(Coordination(Silent(), 0), 0)  # pyright: ignore[reportArgumentType]
    processes = Processes(board, 0, 2, SECONDS)
    leaving = threading.Timer(0.05, lambda: processes.leave(PeerLost("process 1 has ended", 1)))
    leaving.start()
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match="process 1 has ended") as caught:
        processes.hear("save", "")
    assert isinstance(caught.value.__cause__, PeerLost)
    assert time.monotonic() - begun < SECONDS / 2
    leaving.join()


@pytest.mark.parametrize("who", [0, 1])
def test_what_fails_in_one_process_fails_in_all(tmp_path: Path, two: LocalGang, who: int) -> None:
    words = told(two, failing, tmp_path, who)
    for word in words:
        errors: list[str] = eval(word)
        assert len(errors) == 1, word
        for part in ("step-00000002: ", f"could not be written by process {who}: [Errno 28]", "are untouched"):
            assert part in errors[0], word
    assert names(tmp_path) == ["step-00000001-1", "step-00000002", "step-00000003"][::2]
    assert read_all(tmp_path / "step-00000003")["x"][7, 63] == 3.0


def saved(comm: Communicator, folder: Path) -> None:
    with Checkpointer(folder, Every(1), keep=5, timeout_seconds=SECONDS) as saver:
        for number in (1, 2, 3):
            saver.update(a_tree(number))


def restored(comm: Communicator, folder: Path, limit: float = SECONDS) -> str:
    with Checkpointer(folder, Every(1), timeout_seconds=limit) as saver:
        like = a_tree(0) | ({"more": 1} if (folder / "more").exists() else {})
        got = saver.restore(like)["x"]
        reasons = [f"{skipped.path.name}: {skipped.reason}" for skipped in saver.skipped]
        return json.dumps([saver.num_updates, float(got.addressable_shards[0].data[0, 0]), reasons])


def test_all_restore_what_verifies_on_all(tmp_path: Path, two: LocalGang) -> None:
    assert told(two, saved, tmp_path) == ["None"] * 2
    path = tmp_path / "step-00000003" / data_file(1)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (tmp_path / "step-00000002" / manifest_file(0)).write_text("{}")
    first, second = (json.loads(words) for words in told(two, restored, tmp_path))
    assert first == second
    assert first[:2] == [1, 1.0]
    assert first[2][0].startswith("step-00000003: process 1: ")  # which alone needs that part
    assert "leaf 'x' has the checksum" in first[2][0]
    assert "does not match its own checksum" in first[2][1]
    (tmp_path / "more").touch()
    for words in told(two, restored, tmp_path):
        assert "CheckpointError" in words
        assert "leaf 'more' (a Python int) is in `like`, but not in the checkpoint" in words


def late(comm: Communicator, folder: Path, who: int, over: str) -> str:
    """Saves after every update; the disk of one process, which waits for 0.5 s only, hangs in the first checkpoint."""
    released, found = threading.Event(), list[str]()
    fsync = os.fsync

    def hang(descriptor: int) -> None:
        assert released.wait(SECONDS)
        fsync(descriptor)

    limit, processes = 0.5 if comm.rank == who else 600.0, comm if over == "messages" else None
    with Checkpointer(folder, Every(1), timeout_seconds=limit, processes=processes) as saver:
        os.fsync = hang if comm.rank == who else fsync
        begun = time.monotonic()
        try:
            for number in range(1, 5):
                try:
                    saver.update(a_tree(number))
                except BraidaxError as error:
                    found.append(f"{number}: {type(error).__name__}: {error}")
                if number == 2:  # the first update that waits
                    found.append("soon" if time.monotonic() - begun < SECONDS / 2 else "late")
                    comm.barrier()
                    os.fsync = fsync
                    released.set()
                    saver.timeout_seconds = 600.0
        finally:
            os.fsync = fsync
            released.set()
    return json.dumps(found)


@pytest.mark.parametrize(("who", "over"), in_turns([0, 1], ["service", "messages"], every=2))
def test_one_that_waits_no_longer_ends_the_wait_of_the_others(
    tmp_path: Path, two: LocalGang, who: int, over: str
) -> None:
    said = [json.loads(words) for words in told(two, late, tmp_path, who, over)]
    words = f"{tmp_path}/step-00000001: writing this checkpoint took longer than timeout_seconds=0.5"
    assert said[who][0].startswith(f"2: WaitTimeout: {words}")
    assert said[1 - who][0].startswith("2: CheckpointError: ")
    assert f"process {who} " in said[1 - who][0]
    assert words in said[1 - who][0]
    assert [each[1] for each in said] == ["soon", "soon"]
    # Both checkpoints fail on both, and those that follow on neither.
    assert [[error[:18] for error in each[2:]] for each in said] == [["3: CheckpointError"[:18]]] * 2
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert read_all(tmp_path / "step-00000004")["x"][7, 63] == 4.0


def apart(comm: Communicator, folder: Path, who: int, call: str) -> str:
    """One process cannot settle what it writes, or is interrupted, before the others meet it."""
    begun = time.monotonic()
    with Checkpointer(folder, Every(1), timeout_seconds=600.0) as saver:
        saver.save(a_tree(1))
        if comm.rank == who and call == "load":
            restoring_module.load = interrupted
        elif comm.rank == who:
            saver._settle = unsettled
        try:
            try:
                saver.newest() if call == "newest" else saver.restore(a_tree(0))
            except (BraidaxError, KeyboardInterrupt) as error:
                found = f"{type(error).__name__}: {error}"
            else:
                found = "nothing"
        finally:
            restoring_module.load = LOAD
            if comm.rank == who and call != "load":
                del saver._settle
        # All go on together.
        step = saver.newest()
        return json.dumps([found, step, time.monotonic() - begun < SECONDS])


LOAD = restoring_module.load


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt("in the middle")


def unsettled() -> None:
    raise WaitTimeout("its disk hangs")


@pytest.mark.parametrize(("call", "who"), in_turns(["restore", "newest", "load"], [0, 1], every=2))
def test_one_that_raises_before_the_others_meet_it_is_heard_at_once(
    tmp_path: Path, two: LocalGang, who: int, call: str
) -> None:
    said = [json.loads(words) for words in told(two, apart, tmp_path, who, call)]
    words = "KeyboardInterrupt: in the middle" if call == "load" else "WaitTimeout: its disk hangs"
    assert said[who] == [words, 0, True]
    found, *rest = said[1 - who]
    assert found.startswith("CheckpointError: ")
    assert f"process {who}" in found
    assert words.removeprefix("WaitTimeout: ") in found
    assert rest == [0, True]


def parting(comm: Communicator, folder: Path, what: str) -> Any:
    """Process 1 does something else than process 0."""
    if what == "folder" and comm.rank == 1:
        folder = folder / "other"
        folder.mkdir()
        folders.occupy(folder).close()
    with Checkpointer(folder, Every(1), timeout_seconds=SECONDS) as saver:
        if what == "tree":
            saver.save({"y" if comm.rank else "x": a_tree(1)["x"]})
        if what == "leaf":
            saver.save(a_tree(1) | {"n": "text" if comm.rank else 1})
        if what == "nothing" and comm.rank == 0:
            saver.timeout_seconds = 0.5
            saver.save(a_tree(1))
    return None


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("folder", ["expected the folder that process 0 has locked, but its .lock does not have"] * 2),
        ("tree", ["process 1 saves another tree than process 0: expected the same paths"] * 2),
        (
            "leaf",
            ["process 1 could not save its part: CheckpointError: leaf 'n' is of type str", "leaf 'n' is of type"],
        ),
        ("nothing", ["WaitTimeout: process 0 heard nothing from process 1 for timeout_seconds=0.5", "None"]),
    ],
)
def test_processes_that_part_are_told(tmp_path: Path, two: LocalGang, what: str, expected: list[str]) -> None:
    for words, part in zip(told(two, parting, tmp_path, what), expected, strict=True):
        assert part in words
    assert names(tmp_path) == (["other"] if what == "folder" else [])


def test_a_folder_that_is_another_runs_is_refused_by_all(tmp_path: Path, two: LocalGang) -> None:
    with Checkpointer(tmp_path, Every(1)):
        for words in told(two, saved, tmp_path):
            assert f"process {os.getpid()} on" in words
            assert "saves its checkpoints here: expected one open Checkpointer for a folder" in words
    assert told(two, saved, tmp_path) == ["None"] * 2


def turned(comm: Communicator, folder: Path) -> None:
    """Gives messages whose ranks are not the indices of JAX's processes."""
    Checkpointer(folder, Every(1), processes=comm.split(0, key=-comm.rank))


def test_other_ranks_than_those_of_jax_are_refused(tmp_path: Path, two: LocalGang) -> None:
    for rank, words in enumerate(told(two, turned, tmp_path)):
        assert words == (
            f"ArgumentError: processes= has rank {1 - rank} of 2, but this is process {rank} of 2 of JAX: expected the "
            "processes of JAX to have the ranks of their indices, and others the ranks that follow; connect them in "
            "that order"
        )
    assert list(tmp_path.iterdir()) == []
