"""Host arrays that lie in parts on several processes, of which not all are JAX's: one commit, any number of owners."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braidax as bx
from braidax.checkpoint import Folder, HostShard, Neighbors, restore
from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.checkpoint.format.reading import read_manifest
from braidax.checkpoint.messages import MessageChannel
from braidax.checkpoint.places import persist
from braidax.checkpoint.places.same_tree import Said, check_same
from braidax.comm import Communicator
from braidax.errors import ArgumentError, BraidaxError, CheckpointError, PeerLost
from braidax.gang import LocalGang
from tests.support.checkpoint.saving import Longer, Tables, names, read_all
from tests.support.checkpoint.told import told
from tests.support.data.jax_gang import RUN_SECONDS
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children

SECONDS = 30.0
ROWS = 1001
SHAPE = (ROWS, 5)


def rows(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=SHAPE).astype(np.float32)


def counts(step: int) -> np.ndarray:
    return np.arange(7, dtype=np.int64) * step


def bounds(owner: int, num_owners: int) -> tuple[int, int]:
    """Rows of an owner, in shares that are not equal."""
    cuts = [ROWS * number**2 // num_owners**2 for number in range(num_owners + 1)]
    return cuts[owner], cuts[owner + 1]


def shard(content: np.ndarray, first: int, end: int) -> HostShard:
    return HostShard(content[first:end], content.shape, (first, *[0] * (content.ndim - 1)))


def state_of(comm: Communicator, step: int, fill: int = 1, num_owners: int | None = None) -> dict[str, Any]:
    """What a rank saves: rank 0 trains, and the last ranks share the rows: those of servers, or all.

    The last one has the counts.
    """
    num_owners = max(1, comm.size - 1) if num_owners is None else num_owners
    owner = comm.rank - (comm.size - num_owners)
    rows_here = bounds(owner, num_owners) if owner >= 0 else (0, 0)
    found: dict[str, Any] = {"table": shard(fill * rows(step), *rows_here)}
    is_last = comm.rank == comm.size - 1
    if is_last or comm.rank == 0:
        found["counts"] = shard(fill * counts(step), 0, 7 if is_last else 0)
    if comm.rank == 0:
        found |= {"w": jnp.full(9, fill * step, jnp.float32), "epoch": fill * step}
    return found


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got = found[name]
        if isinstance(want, HostShard):
            assert (got.shape, got.start) == (want.shape, want.start)
            got, want = got.value, want.value
            assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes(), name


def group(comm: Communicator, size: int) -> Communicator:
    """The first ranks, as many as that; the others are alone."""
    return comm.split(0 if comm.rank < size else comm.rank)


def saved(comm: Communicator, folder: Path, size: int, num_owners: int) -> str:
    """Goes on from what is there, with as many processes, and saves twice."""
    few = group(comm, size)
    few.timeout_seconds = SECONDS
    if comm.rank >= size:
        return ""
    assert not jax._src.xla_bridge.backends_are_initialized() or comm.rank == 0  # pyright: ignore
    with bx.Checkpointer(folder, bx.Every(2), timeout_seconds=SECONDS, processes=few) as saver:
        before = saver.newest()
        like = state_of(few, before or 0, 0, num_owners)
        found = saver.restore(like)
        check(found, like if before is None else state_of(few, before, 1, num_owners))
        for _ in range(4):
            saver.update(state_of(few, saver.num_updates + 1, 1, num_owners))
    assert not jax._src.xla_bridge.backends_are_initialized() or comm.rank == 0  # pyright: ignore
    return f"{before} {saver.num_updates}"


@pytest.fixture(scope="module")
def gang() -> Iterator[LocalGang]:
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch, *LOAD_AND_SAVE)
        with LocalGang(3, environment={"JAX_PLATFORMS": "cpu"}) as running:
            yield running


def test_two_owners_become_one_and_three_bit_for_bit(tmp_path: Path, gang: LocalGang) -> None:
    assert told(gang, saved, tmp_path, 3, 2) == ["None 4"] * 3  # two servers beside one that trains
    folder = tmp_path / "step-00000004"
    assert names(folder) == sorted(name(part) for part in range(3) for name in (data_file, manifest_file))
    parts = [{tensor.path: tensor.shape for tensor in read_manifest(folder, part).tensors} for part in range(3)]
    assert parts == [{"w": (9,)}, {"table": (250, 5)}, {"table": (751, 5), "counts": (7,)}]
    assert told(gang, saved, tmp_path, 2, 1) == ["4 8"] * 2 + [""]
    assert told(gang, saved, tmp_path, 3, 3) == ["8 12"] * 3
    assert told(gang, saved, tmp_path, 1, 1) == ["12 16"] + [""] * 2
    content = read_all(tmp_path / "step-00000016")
    assert content["table"].tobytes() == rows(16).tobytes()
    assert (content["counts"].tolist(), content["epoch"]) == (counts(16).tolist(), 16)
    # It is an array like any other, and any other is one.
    like = {"table": jnp.zeros(SHAPE), "w": shard(np.zeros(9, np.float32), 3, 5), "counts": np.zeros(7, np.int64)}
    found = restore(tmp_path / "step-00000016" / "..", like | {"epoch": 0}).tree
    assert np.asarray(found["table"]).tobytes() == rows(16).tobytes()
    assert (found["w"].value.tolist(), found["w"].start) == ([16, 16], (3,))


def test_who_measures_tells_the_servers_when_a_checkpoint_is_due(tmp_path: Path, gang: LocalGang) -> None:
    assert told(gang, measured, tmp_path) == ["300"] * 3
    found = names(tmp_path / "run")
    assert len(found) > 2
    assert read_all(tmp_path / "run" / found[-1])["table"].tobytes() == rows(int(found[-1][5:])).tobytes()


def measured(comm: Communicator, folder: Path) -> str:
    """Saves after what a run over the same messages has left unread: when its first checkpoints are due."""
    comm.timeout_seconds = SECONDS
    interval = bx.Adaptive(max_lost_seconds=1e-9)
    with bx.Checkpointer(folder / "before", interval, timeout_seconds=SECONDS, processes=comm) as saver:
        saver.update(state_of(comm, 1))
    places = Folder(folder / "run", keep=99)
    with bx.Checkpointer(places, interval, timeout_seconds=SECONDS, processes=comm) as saver:
        for number in range(1, 301):
            saver.update(state_of(comm, number))
            comm.barrier()
    return str(saver.num_updates)


def everywhere(comm: Communicator, folder: Path) -> str:
    comm.timeout_seconds = SECONDS
    places = [Neighbors(folder / "memory", comm), Folder(folder / "disk", every=3)]
    with bx.Checkpointer(places, bx.Every(1), timeout_seconds=SECONDS, processes=comm) as saver:
        before = saver.newest()
        found = saver.restore(state_of(comm, before or 0, fill=0))
        check(found, state_of(comm, before or 0, fill=int(before is not None)))
        for _ in range(2):
            saver.update(state_of(comm, saver.num_updates + 1))
    return str(before)


def test_servers_keep_parts_of_their_neighbors_too(tmp_path: Path, gang: LocalGang) -> None:
    assert told(gang, everywhere, tmp_path) == ["None"] * 3
    assert names(tmp_path / "memory" / "slot-2" / "step-00000002") == sorted(
        name(part) for part in (1, 2) for name in (data_file, manifest_file)
    )
    (tmp_path / "memory" / "slot-2").rename(tmp_path / "lost")
    assert told(gang, everywhere, tmp_path) == ["2"] * 3
    assert names(tmp_path / "disk") == ["step-00000001", "step-00000003"]


def failing(comm: Communicator, folder: Path, who: int) -> str:
    """Saves three times; the disk of one process is full at the second, which only it knows."""
    comm.timeout_seconds = SECONDS
    found: list[str] = []
    write = persist.write

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with bx.Checkpointer(folder, bx.Every(1), timeout_seconds=SECONDS, processes=comm) as saver:
        for number in (1, 2, 3):
            persist.write = full if comm.rank == who and number == 2 else write
            try:
                saver.num_updates = number
                saver.save(state_of(comm, number))
            except BraidaxError as error:
                found.append(str(error))
            finally:
                persist.write = write
    return json.dumps(found)


@pytest.mark.parametrize("who", [0, 2])
def test_durable_on_all_or_not_at_all(tmp_path: Path, gang: LocalGang, who: int) -> None:
    for words in told(gang, failing, tmp_path, who):
        (error,) = json.loads(words)
        assert f"step-00000002: the checkpoint could not be written by process {who}: [Errno 28]" in error
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert read_all(tmp_path / "step-00000003")["table"].tobytes() == rows(3).tobytes()


def refusing(comm: Communicator, folder: Path) -> str:
    """One server cannot save what it has, and another one has what is another's."""
    comm.timeout_seconds = SECONDS
    found: list[str] = []
    with bx.Checkpointer(folder, bx.Every(1), timeout_seconds=SECONDS, processes=comm) as saver:
        trees = [state_of(comm, 1) for _ in range(4)]
        if comm.rank == 1:
            trees[0] |= {"more": "text"}
            trees[1] |= {"table": shard(rows(1), 0, 300)}
            trees[2] |= {"more": shard(rows(1), 0, ROWS)}
        for number, tree in enumerate(trees):
            saver.num_updates = number
            try:
                saver.save(tree)
            except BraidaxError as error:
                found.append(str(error))
    return json.dumps(found)


def test_trees_that_are_not_one_are_refused_on_all(tmp_path: Path, gang: LocalGang) -> None:
    for rank, words in enumerate(told(gang, refusing, tmp_path)):
        text, twice, unknown = json.loads(words)
        assert "leaf 'more' is of type str" in text
        assert ("process 1 could not save its part: " in text) == (rank != 1)
        assert "processes 1 and 2 both have [250:300, 0:5] of leaf 'table': expected HostShards that have" in twice
        assert "process 1 saves a part of leaf 'more', float32[1001, 5], and process 0 has none of that path" in unknown
    assert names(tmp_path) == ["step-00000003"]


def dying(comm: Communicator, folder: Path, who: int) -> None:
    """Saves twice; one process is killed when it has written its part of the second."""
    comm.timeout_seconds = SECONDS
    write = persist.write

    def kill(folder: Path, *arguments: Any, **options: Any) -> None:
        write(folder, *arguments, **options)
        if folder.name.startswith(".step-00000002") and comm.rank == who:
            os.kill(os.getpid(), signal.SIGKILL)

    persist.write = kill
    with bx.Checkpointer(folder, bx.Every(1), timeout_seconds=SECONDS, processes=comm) as saver:
        for number in (1, 2):
            saver.update(state_of(comm, number))


# The last one that the gang runs.
def test_a_server_that_is_killed_leaves_no_half_checkpoint(tmp_path: Path, gang: LocalGang) -> None:
    with pytest.raises(PeerLost, match="rank 2"):
        gang.run(dying, tmp_path, 2, timeout_seconds=RUN_SECONDS)
    assert names(tmp_path)[-1] == "step-00000001"
    like = {"table": np.zeros(SHAPE, np.float32), "counts": np.zeros(7, np.int64), "w": jnp.zeros(9), "epoch": 0}
    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver:
        assert names(tmp_path) == ["step-00000001"]  # the rest is gone
        found = saver.restore(like)
        saver.update(found)
    assert found["table"].tobytes() == rows(1).tobytes()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


# One process.


@pytest.mark.parametrize(
    ("start", "shape"), [((0,), (4, 2)), ((3, 0), (4, 2)), ((-1, 0), (4, 2)), ((0, 1), (4, 2)), ((), ())]
)
def test_a_part_lies_within(start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"value= of shape \(2, 2\) at start=.*: expected a part of an array with"):
        HostShard(np.zeros((2, 2)), shape, start)


def test_a_process_alone_has_all_of_it(tmp_path: Path) -> None:
    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver:
        with pytest.raises(CheckpointError, match=r"have 1500 elements of leaf 'x' of shape \[1001, 5\], expected"):
            saver.save({"x": shard(rows(1), 100, 400)})
        saver.save({"x": shard(rows(2), 0, ROWS)})
        assert saver.restore({"x": shard(0 * rows(2), 5, 9)})["x"].value.tolist() == rows(2)[5:9].tolist()
        with pytest.raises(CheckpointError, match=r"leaf 'x' is float32\[1001, 5\] in the checkpoint, but float64"):
            saver.restore({"x": shard(np.zeros(SHAPE), 5, 9)})
    words = r"leaf 'y' .* is in the checkpoint, but not in `like`"  # nobody else restores it
    with bx.Checkpointer(tmp_path / "two", bx.Every(1)) as saver:
        saver.save({"x": shard(rows(1), 0, ROWS), "y": 1})
        with pytest.raises(CheckpointError, match=words):
            saver.restore({"x": shard(rows(1), 0, ROWS)})


def test_a_list_restores_with_as_many_rows_as_it_had(tmp_path: Path) -> None:
    """Whatever there are now; each of several processes gets an even part."""

    def some(first: int, end: int, which: int = 0, parts: int = 1) -> dict[str, HostShard]:
        return {"rows": HostShard(rows(1)[first:end], (end - first, 5), (0, 0), share=(which, parts))}

    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver:
        saver.save(some(0, 77))
        for which, (first, end) in enumerate([(0, 25), (25, 51), (51, 77)]):
            found = saver.restore(some(0, 3, which, 3))["rows"]
            assert (found.shape, found.start) == ((77, 5), (first, 0))
            np.testing.assert_array_equal(found.value, rows(1)[first:end])
        with pytest.raises(CheckpointError, match=r"float32\[77, 5\] in the checkpoint, but float32\[3, 4\]"):
            saver.restore({"rows": HostShard(np.zeros((3, 4), np.float32), (3, 4), (0, 0), share=(0, 1))})


def test_what_is_changed_after_update_is_saved_as_it_was(tmp_path: Path) -> None:
    table = rows(1)
    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver:
        saver.update({"x": shard(table, 0, ROWS)})
        table[:] = 0
    assert read_all(tmp_path / "step-00000001")["x"].tobytes() == rows(1).tobytes()


def test_rows_that_are_padded_move_as_those_of_arrays(tmp_path: Path) -> None:
    table = np.arange(20, dtype=np.int32).reshape(5, 2, 2)  # V = 9 of 10 rows
    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver:
        saver.save(Tables(HostShard(table, (5, 2, 2), (0, 0, 0)), {"table": 9}))
        found = saver.restore(Tables(HostShard(np.zeros((4, 2), np.int32), (9, 2), (3, 0)), {}))
    assert found.table.value.tolist() == table.reshape(10, 2)[3:7].tolist()


def test_of_true_shapes_a_shard_knows_nothing(tmp_path: Path) -> None:
    part = shard(rows(1), 0, ROWS)
    with bx.Checkpointer(tmp_path, bx.Every(1)) as saver:
        for tree in (Longer({"x": part}, {"arrays/x": (9, 5)}), Longer({"x": (part, part)}, {"arrays/x": (2002, 5)})):
            with pytest.raises(CheckpointError, match=r"true_shapes speaks of leaf 'arrays/x.*', a HostShard"):
                saver.save(tree)


def test_trees_are_compared() -> None:
    part = ("t", "int8", (4, 2), ((0, 4), (0, 2)))
    check_same("here", {0: Said("a", [part]), 1: Said("", []), 2: Said("a", [])})
    with pytest.raises(CheckpointError, match="here: process 2 saves another tree than process 0: expected the same"):
        check_same("here", {0: Said("a", []), 1: Said("", []), 2: Said("b", [])})
    with pytest.raises(CheckpointError, match=r"a part of leaf 't', int8\[4, 2\], and process 0 has int8\[4, 3\]"):
        check_same("here", {0: Said("", [("t", "int8", (4, 3), ((0, 0), (0, 3)))]), 1: Said("", [part])})


def test_words_that_nobody_asked_for_go(tmp_path: Path) -> None:
    class Line:
        rank, size, hosts, timeout_seconds = 1, 2, ("a", "a"), SECONDS

        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def send(self, value: Any, dest: int, *, tag: int = 0) -> None:
            assert dest == 0
            self.sent.append(bytes(value))

        def recv(self, source: int, *, tag: int = 0) -> Any:
            return self.sent.pop(0)

        def all_gather(self, value: Any) -> list[Any]:
            raise AssertionError

        def all_to_all(self, parts: Any) -> list[Any]:
            raise AssertionError

    line = Line()
    MessageChannel(line, b"before").write("new", b"0")
    channel = MessageChannel(line, b"now")
    for key, value in (("old", b"1"), ("new", b"2"), ("new", b"3"), ("next", b"\0")):
        channel.write(key, value)
    assert channel.read("new", 0, 1.0) == b"2"  # the first word counts
    assert channel.read("next", 0, 1.0) == b"\0"
