"""Schedules, run by all members against one another in a network that is simulated: messages take any time they like.

A message is read where it lies when it arrives, so that memory that is changed too early shows in the result.
"""

import functools
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidax.comm.collectives import broadcasts, exchanges, reductions
from braidax.comm.collectives.schedule import OUT, OWN, SCRATCH, Kind, Part, Schedule, Step
from braidax.comm.group_messages import HEAD_BYTES

HOSTS = {
    "one": lambda size: [0] * size,
    "each its own": lambda size: list(range(size)),
    "pairs": lambda size: [rank // 2 for rank in range(size)],
    "alternating": lambda size: [rank % 2 for rank in range(size)],
    "one apart": lambda size: [0] * (size - 1) + [1],
}


@final
class Network:
    """Runs all members' schedules. **Fields:** `most_unasked`: messages between two that no receive waited for."""

    def __init__(self, schedules: Sequence[Schedule], own: Sequence[Any], out: Sequence[Any], seed: int) -> None:
        self.most_unasked = 0
        self._schedules = schedules
        self._draw = random.Random(seed)
        self._places = [
            {OWN: _bytes(mine), OUT: _bytes(result), SCRATCH: np.full(schedule.scratch_bytes, 255, np.uint8)}
            for schedule, mine, result in zip(schedules, own, out, strict=True)
        ]
        self._sent: defaultdict[tuple[int, int], deque[Step]] = defaultdict(deque)
        self._posted: defaultdict[tuple[int, int], deque[Step]] = defaultdict(deque)
        self._ended: list[set[int]] = [set() for _ in schedules]

    def run(self, dtype: Any) -> None:
        positions = [0] * len(self._schedules)
        while any(position < len(each.steps) for position, each in zip(positions, self._schedules, strict=True)):
            can_go_on = [rank for rank in range(len(positions)) if self._goes_on(rank, positions[rank])]
            arriving = [pair for pair in self._sent if self._sent[pair] and self._posted[pair]]
            assert can_go_on or arriving, "all wait for one another"
            if can_go_on and (not arriving or self._draw.random() < 0.7):
                rank = self._draw.choice(can_go_on)
                self._do(rank, self._schedules[rank].steps[positions[rank]], dtype)
                positions[rank] += 1
            else:
                self._deliver(*self._draw.choice(arriving))
        assert not any(self._sent.values()), "messages that nobody has asked for"
        assert not any(self._posted.values()), "receives that nobody has sent to"

    def _goes_on(self, rank: int, position: int) -> bool:
        steps = self._schedules[rank].steps
        if position == len(steps):
            return False
        return steps[position].kind is not Kind.WAIT or steps[position].ticket in self._ended[rank]

    def _do(self, rank: int, step: Step, dtype: Any) -> None:
        match step.kind:
            case Kind.SEND:
                self._sent[rank, step.peer].append(step)
                unasked = len(self._sent[rank, step.peer]) - len(self._posted[rank, step.peer])
                self.most_unasked = max(self.most_unasked, unasked)
            case Kind.RECEIVE:
                self._posted[step.peer, rank].append(step)
            case Kind.REDUCE:
                first, second, to = (
                    self._memory(rank, part).view(dtype) for part in (step.first, step.second, step.to)
                )
                np.add(first, second, out=to)
            case Kind.COPY:
                self._memory(rank, step.to)[:] = self._memory(rank, step.first)
            case Kind.WAIT:
                pass

    def _deliver(self, source: int, dest: int) -> None:
        sent, posted = self._sent[source, dest].popleft(), self._posted[source, dest].popleft()
        assert (sent.room is None) == (posted.room is None), "one of both is headed"
        assert sent.to.num_bytes == posted.to.num_bytes
        place = posted.to
        if posted.room is not None:
            assert posted.to == posted.room.part(HEAD_BYTES, HEAD_BYTES + sent.to.num_bytes)
        self._memory(dest, place)[:] = self._memory(source, sent.to)
        self._ended[source].add(sent.ticket)
        self._ended[dest].add(posted.ticket)

    def _memory(self, rank: int, part: Part) -> Any:
        whole = self._places[rank][part.place]
        assert 0 <= part.begin <= part.begin + part.num_bytes <= len(whole)
        return whole[part.begin : part.begin + part.num_bytes]


def _bytes(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)


def _arrays(size: int, count: int) -> list[Any]:
    return [np.arange(count) * (rank + 1) + rank for rank in range(size)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces of arrays that are small enough to be drawn."""
    for module in (reductions, broadcasts):
        monkeypatch.setattr(module, "_PIECE_BYTES", 4096)


SIZES = st.integers(1, 12)
COUNTS = st.one_of(st.integers(0, 40), st.integers(2000, 9000))


@settings(max_examples=30, deadline=None)
@given(SIZES, COUNTS, st.sampled_from(sorted(HOSTS)), st.booleans(), st.integers(0, 1000))
def test_all_reduce(size: int, count: int, hosts: str, in_place: bool, seed: int) -> None:
    own = _arrays(size, count)
    expected = np.sum(own, axis=0)
    out = own if in_place else [np.zeros_like(each) for each in own]
    numbers = HOSTS[hosts](size)
    schedules = [reductions.all_reduce(rank, numbers, 8 * count, 8) for rank in range(size)]
    Network(schedules, own, out, seed).run(np.int64)
    for found in out:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_small_arrays_are_reduced_in_one_round_and_all_get_the_same_bits(size: int) -> None:
    schedules = [reductions.all_reduce(rank, [0] * size, 4 * 24, 4) for rank in range(size)]
    for schedule in schedules:
        kinds = [step.kind for step in schedule.steps]
        waits = kinds.index(Kind.WAIT)
        assert kinds.count(Kind.SEND) == kinds[:waits].count(Kind.SEND) == size - 1
        assert kinds.count(Kind.RECEIVE) == kinds[:waits].count(Kind.RECEIVE) == size - 1
    own = list(np.random.default_rng(size).normal(size=(size, 24)).astype(np.float32))
    out = [np.zeros_like(each) for each in own]
    Network(schedules, own, out, size).run(np.float32)
    assert {each.tobytes() for each in out} == {functools.reduce(np.add, own).tobytes()}


@settings(max_examples=15, deadline=None)
@given(SIZES, COUNTS, st.data())
def test_reduce(size: int, count: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    own = _arrays(size, count)
    out = [np.zeros(count if rank == root else 0, np.int64) for rank in range(size)]
    schedules = [reductions.reduce(rank, size, 8 * count, 8, root) for rank in range(size)]
    Network(schedules, own, out, root).run(np.int64)
    np.testing.assert_array_equal(out[root], np.sum(own, axis=0))


@settings(max_examples=15, deadline=None)
@given(SIZES, COUNTS, st.integers(0, 1000))
def test_reduce_scatter(size: int, count: int, seed: int) -> None:
    own = _arrays(size, size * count)
    out = [np.zeros(count, np.int64) for _ in range(size)]
    Network([reductions.reduce_scatter(rank, size, 8 * size * count, 8) for rank in range(size)], own, out, seed).run(
        np.int64
    )
    np.testing.assert_array_equal(np.concatenate(out), np.sum(own, axis=0))


@settings(max_examples=15, deadline=None)
@given(SIZES, COUNTS, st.integers(0, 1000))
def test_all_to_all(size: int, count: int, seed: int) -> None:
    own, out = _arrays(size, size * count), [np.zeros(size * count, np.int64) for _ in range(size)]
    Network([exchanges.all_to_all(rank, size, 8 * count) for rank in range(size)], own, out, seed).run(np.int64)
    expected = np.stack(own).reshape(size, size, count).swapaxes(0, 1)
    np.testing.assert_array_equal(np.stack(out).reshape(size, size, count), expected)


@settings(max_examples=15, deadline=None)
@given(SIZES, COUNTS, st.integers(0, 1000))
def test_all_gather(size: int, count: int, seed: int) -> None:
    own, out = _arrays(size, count), [np.zeros(size * count, np.int64) for _ in range(size)]
    Network([exchanges.all_gather(rank, size, 8 * count) for rank in range(size)], own, out, seed).run(np.int64)
    for found in out:
        np.testing.assert_array_equal(found, np.concatenate(own))


@settings(max_examples=30, deadline=None)
@given(SIZES, st.one_of(st.integers(0, 40), st.integers(1900, 40_000)), st.data())
def test_broadcast(size: int, count: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    mine, nothing = np.arange(count) + root, np.empty(0, np.int64)
    own = [mine if rank == root else nothing for rank in range(size)]
    out = [nothing if rank == root else np.zeros(count, np.int64) for rank in range(size)]
    schedules = [broadcasts.broadcast(rank, size, 8 * count, root) for rank in range(size)]
    Network(schedules, own, out, root).run(np.int64)
    for rank in range(size):
        if rank != root:
            np.testing.assert_array_equal(out[rank], mine)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_large_broadcast_crosses_each_link_once(size: int) -> None:
    """And each member sends a piece on before the next one has come."""
    num_bytes = 100 * 4096
    for rank in range(size):
        steps = broadcasts.broadcast(rank, size, num_bytes, 1).steps
        sent = [step for step in steps if step.kind is Kind.SEND and step.room is None]
        assert sum(step.to.num_bytes for step in sent) == (0 if rank == 0 else num_bytes)
        if rank > 1:
            waited = [step.ticket for step in steps if step.kind is Kind.WAIT]
            last = max(step.ticket for step in steps if step.kind is Kind.RECEIVE)
            assert steps.index(sent[0]) < steps.index(Step(Kind.WAIT, ticket=last))
            assert len(waited) == len(set(waited))


def test_the_root_sends_before_it_has_heard_anybody() -> None:
    for num_bytes in (100, 100 * 4096):
        steps = broadcasts.broadcast(0, 4, num_bytes, 0).steps
        kinds = [step.kind for step in steps]
        last = max(index for index, kind in enumerate(kinds) if kind is Kind.SEND)
        assert last < kinds.index(Kind.WAIT)


@pytest.mark.parametrize("size", range(1, 13))
def test_nobody_leaves_a_barrier_before_all_have_come(size: int) -> None:
    """Whatever rank is late, all others wait for a message that goes back to it."""
    schedules = [exchanges.barrier(rank, size) for rank in range(size)]
    nothing = [np.empty(0, np.uint8)] * size
    Network(schedules, nothing, nothing, size).run(np.uint8)
    knows = [{rank} for rank in range(size)]
    for round_ in range(max(1, (size - 1).bit_length())):
        before = [set(each) for each in knows]
        for rank, schedule in enumerate(schedules):
            heard = [step.peer for step in schedule.steps if step.kind is Kind.RECEIVE]
            if round_ < len(heard):
                knows[rank] |= before[heard[round_]]
    assert knows == [set(range(size))] * size


@pytest.mark.parametrize("size", [2, 3, 8, 10])
def test_nobody_sends_far_ahead(size: int) -> None:
    """What comes unasked has to be kept by its receiver: two pieces of either phase at most, and heads."""
    own = _arrays(size, 60_000)
    schedules = [reductions.all_reduce(rank, [0] * size, own[0].nbytes, 8) for rank in range(size)]
    assert len(schedules[0].steps) > 100
    network = Network(schedules, own, [np.zeros_like(each) for each in own], size)
    network.run(np.int64)
    assert network.most_unasked <= 6


def test_a_schedule_is_the_same_data_as_rows() -> None:
    schedule = reductions.all_reduce(1, [0, 0, 0], 24, 8)
    rows = schedule.rows([10, 11, 12])
    assert rows.shape == (len(schedule.steps), 11)
    messages = rows[rows[:, 0] <= Kind.RECEIVE]
    assert set(messages[:, 1].tolist()) <= {10, 12}
    assert messages[:, 2].tolist() == list(range(schedule.num_tickets))
    assert set(rows[rows[:, 0] == Kind.WAIT][:, 2].tolist()) == set(range(schedule.num_tickets))
    headed = rows[(rows[:, 0] == Kind.RECEIVE) & (rows[:, 4] > 0)]
    assert np.all(headed[:, 5] == SCRATCH)
    assert np.all(headed[:, 4] >= headed[:, 3] + HEAD_BYTES)
