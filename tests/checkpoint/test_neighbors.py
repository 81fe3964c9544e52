"""Parts of checkpoints on two hosts each: who is whose neighbor, who reads what from whom, and one process alone."""

import itertools
import queue
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braidax as bx
from braidax.checkpoint import Messages, Neighbors
from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.checkpoint.places import passing
from braidax.checkpoint.places.lockstep import Lockstep
from braidax.checkpoint.places.passing import position_of
from braidax.comm import Communicator
from braidax.errors import ArgumentError, CheckpointError
from tests.support.checkpoint.neighbors import SECONDS, Together, alone, saving
from tests.support.checkpoint.saving import bits, names


def test_the_protocol_is_what_a_communicator_has() -> None:
    assert isinstance(alone(), Messages)
    for name in ("send", "recv", "all_gather", "all_to_all"):
        assert callable(getattr(Communicator, name))


@pytest.mark.parametrize(
    ("hosts", "dests"),
    [
        ("a", [0]),
        ("aa", [1, 0]),
        ("aaa", [1, 2, 0]),
        ("ab", [1, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("aab", [2, 0, 1]),
    ],
)
def test_the_neighbor_is_on_another_host_where_there_is_one(hosts: str, dests: list[int]) -> None:
    positions = [position_of(rank, hosts) for rank in range(len(hosts))]
    assert [position.dest for position in positions] == dests
    assert [positions[position.dest].source for position in positions] == list(range(len(hosts)))
    for host in set(hosts):
        mine = [position for position, each in zip(positions, hosts, strict=True) if each == host]
        assert [(position.slot, position.num_slots) for position in mine] == [(n, len(mine)) for n in range(len(mine))]


@pytest.mark.parametrize("hosts", ["ab", "abc", "aaaaa", "aabb", "aabbcc", "aab", "abcdefg", "aabbccdd"])
def test_of_those_that_sit_in_a_ring_some_receive_first(hosts: str) -> None:
    positions = [position_of(rank, hosts) for rank in range(len(hosts))]
    for rank, position in enumerate(positions):
        ring, at = [position.sends_first], position.dest
        while at != rank:
            ring.append(positions[at].sends_first)
            at = positions[at].dest
        assert set(ring) == {True, False}
        # Wherever a send ends when it is received, a block travels in two turns, or in three where they are odd.
        assert sum(one == other for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)) == len(ring) % 2


def test_each_reads_as_much_as_it_needs_and_answers_the_others() -> None:
    files = [np.random.default_rng(number).bytes(1000) for number in range(3)]
    barrier, shared = threading.Barrier(3), [None] * 3
    found: dict[int, bytes] = {}

    def run(rank: int, num_reads: int) -> None:
        lockstep = Lockstep(
            Together(rank, 3, shared, barrier), lambda file, start, size: files[file][start : start + size]
        )
        for number in range(num_reads):
            holder, memory = (rank + 1 + number % 2) % 3, bytearray(100)
            count = lockstep.read(holder, holder, memoryview(memory), number * 90)
            found[rank, number] = bytes(memory[:count])
        lockstep.finish()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in ((0, 0), (1, 4), (2, 11))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(found) == 15
    for (rank, number), content in found.items():
        assert content == files[(rank + 1 + number % 2) % 3][number * 90 : number * 90 + 100]


class Met(Together):
    """Messages among threads, whose sends end when they are received; what is sent is counted."""

    def __init__(self, rank: int, size: int, shared: list[Any], barrier: threading.Barrier, links: Any) -> None:
        super().__init__(rank, size, shared, barrier)
        self.num_bytes = 0
        self._links = links

    def send(self, value: Any, dest: int, *, tag: int = 0) -> None:
        self.num_bytes += len(value)
        sent, received = self._links[self.rank, dest]
        sent.put(value)
        assert received.get(timeout=SECONDS) == "received"

    def recv(self, source: int, *, tag: int = 0) -> Any:
        sent, received = self._links[source, self.rank]
        value = sent.get(timeout=SECONDS)
        received.put("received")
        return value

    def all_to_all(self, parts: Sequence[Any]) -> list[Any]:
        raise AssertionError("a part goes to one neighbor, and to nobody else")


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_part_goes_to_one_neighbor_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(passing, "_BLOCK_BYTES", 1000)
    barrier, shared = threading.Barrier(size), [None] * size
    links = {pair: (queue.Queue(), queue.Queue()) for pair in itertools.product(range(size), repeat=2)}
    sizes = [(10_000 * (1 + 3 * rank % 4) + rank, 900 * rank) for rank in range(size)]
    ranks = [Met(rank, size, shared, barrier, links) for rank in range(size)]
    failures: list[Exception | None] = []

    def run(rank: int) -> None:
        position = passing.position_of(rank, ranks[rank].hosts)
        failures.append(passing.pass_on(ranks[rank], position, tmp_path / str(rank), sizes))

    for rank in range(size):
        (tmp_path / str(rank)).mkdir()
        for name, num_bytes in zip((data_file, manifest_file), sizes[rank], strict=True):
            (tmp_path / str(rank) / name(rank)).write_bytes(np.random.default_rng(rank).bytes(num_bytes))
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert failures == [None] * size
    assert [messages.num_bytes for messages in ranks] == [sum(each) for each in sizes]
    for rank, messages in enumerate(ranks):
        source = passing.position_of(rank, messages.hosts).source
        for name in (data_file, manifest_file):
            mine, theirs = tmp_path / str(rank) / name(source), tmp_path / str(source) / name(source)
            assert mine.read_bytes() == theirs.read_bytes()


def small(number: int) -> dict[str, Any]:
    return {"w": jnp.arange(12.0) * number, "key": jax.random.key(number), "epoch": number}


def same(one: Any, other: Any) -> bool:
    return [bits(leaf) for leaf in jax.tree.leaves(one)] == [bits(leaf) for leaf in jax.tree.leaves(other)]


def test_a_process_alone_keeps_the_newest_of_its_own(tmp_path: Path) -> None:
    with saving(tmp_path, 2) as saver:
        assert saver.newest() is None
        like = small(9)
        assert saver.restore(like) is like
        step = jax.jit(lambda w: w + 1, donate_argnums=0)
        state = small(0)
        for number in range(1, 6):
            state["w"] = step(state["w"])
            saver.update(state | {"epoch": number})
            saver.wait()
        assert saver.num_updates == 5
    assert names(tmp_path) == ["slot-0"]
    assert names(tmp_path / "slot-0") == ["step-00000004"]
    with saving(tmp_path, 2) as saver:
        assert saver.newest() == 4
        assert same(saver.restore(small(9)), small(0) | {"w": jnp.arange(12.0) * 0 + 4, "epoch": 4})
        assert saver.num_updates == 4
        assert saver.save(small(5)) == tmp_path / "slot-0" / "step-00000004-1"
        saver.timeout_seconds = 3.0
        assert saver.timeout_seconds == 3.0
    assert names(tmp_path / "slot-0") == ["step-00000004-1"]
    with pytest.raises(CheckpointError, match="this Checkpointer is closed; make a new one"):
        saver.update(small(1))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="messages= has rank 1 of 2, but this is process 0 of 1 that save together"):
        bx.Checkpointer(Neighbors(tmp_path, Together(1, 2, [None, None], threading.Barrier(2))), bx.Every(1))
    with saving(tmp_path) as saver:
        saver.save(small(1))
        words = r"process 0 could not open its folder: path='.*slot-0': process \d+ on .* saves its checkpoints here"
        with pytest.raises(CheckpointError, match=words):
            saving(tmp_path)
        with pytest.raises(CheckpointError, match=r"leaf 'w' is of type str"):
            saver.save({"w": "text"})
        saver.update(small(2))
    with saving(tmp_path) as saver:
        with pytest.raises(
            CheckpointError, match="has checkpoints of an earlier run, the newest step-00000001, which a new"
        ):
            saver.update(small(1))
        with pytest.raises(CheckpointError, match=r"leaf 'more' .* is in `like`, but not in the checkpoint"):
            saver.restore(small(1) | {"more": 1})
        assert same(saver.restore(small(1), only=("w",)), small(1) | {"w": small(2)["w"]})


def test_only_what_is_due_is_prepared_and_that_is_what_is_saved(tmp_path: Path) -> None:
    prepared: list[float] = []

    def prepare(tree: Any) -> Any:
        prepared.append(float(tree["x"]))
        return {"x": tree["x"] + 100}

    with bx.Checkpointer(Neighbors(tmp_path, alone()), bx.Every(3), prepare=prepare) as saver:
        for number in range(1, 8):
            saver.update({"x": jnp.float32(number)})
        saver.save({"x": jnp.float32(8)})
        assert prepared == [3, 6, 8]
        assert saver.restore({"x": jnp.float32(0)}) == {"x": 108}


def test_folders_of_processes_that_are_no_more_go_but_not_those_of_others(tmp_path: Path) -> None:
    with saving(tmp_path) as saver:
        saver.save(small(1))
    shutil.copytree(tmp_path / "slot-0", tmp_path / "slot-1")
    shutil.copytree(tmp_path / "slot-0", tmp_path / "slot-2")
    shutil.copytree(tmp_path / "slot-0", tmp_path / "slot-3")
    (tmp_path / "slot-2" / "notes.txt").write_text("of somebody")
    for name in ("slot-4", "slot-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "coins.txt").write_text("of a casino")
    with saving(tmp_path) as saver, bx.Checkpointer(tmp_path / "slot-3", bx.Every(1)):
        assert same(saver.restore(small(0)), small(1))
        saver.save(small(2))
    assert names(tmp_path) == ["slot-0", "slot-2", "slot-3", "slot-4", "slot-b"]
    assert names(tmp_path / "slot-2") == ["notes.txt"]
    assert names(tmp_path / "slot-3") == ["step-00000000"]
    assert names(tmp_path / "slot-4") == names(tmp_path / "slot-b") == ["coins.txt"]


def test_a_copy_under_another_name_is_not_restored_and_stays(tmp_path: Path) -> None:
    with saving(tmp_path) as saver:
        for number in (1, 2):
            saver.update(small(number))
    shutil.copytree(tmp_path / "slot-0" / "step-00000002", tmp_path / "slot-0" / "step-00000099")
    with saving(tmp_path) as saver:
        assert same(saver.restore(small(0)), small(2))
        assert saver.num_updates == 2
        assert saver.save(small(3)).name == "step-00000002-1"
    assert names(tmp_path / "slot-0") == ["step-00000002-1", "step-00000099"]
