"""Checkpoints of what servers have of a run of workers."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.gang import LocalGang
from braidax.parallel.served.wire import unpacked
from tests.support.parallel.workers.teams import BATCH, WORDS, assert_close, batches, make_step, own_part, team

NUM_STEPS, SAVED = 8, 5
SLOW = pytest.mark.slow
Asked = Callable[[str, int, Any], object]
"""Is told of each question that a step asks: its kind, the server, and its fields."""


def watch(step: Any, *, before: Asked = lambda *_: None, behind: Asked = lambda *_: None) -> None:
    """Lets others know what a step asks. **Arguments:** `before`, `behind`: the answer."""
    ask = step._servers._asking.ask

    def asked(rank: int, question: Any) -> Any:
        kind, fields, _ = unpacked(question)
        before(kind, rank, fields)
        answer = ask(rank, question)
        behind(kind, rank, fields)
        return answer

    step._servers._asking.ask = asked


def trained(step: Any, state: Any, number: int, data: list[Any], after: Any = lambda state: None) -> Any:
    for batch in data:
        state, _ = step.update(state, own_part(batch, number, 2))
        after(state)
    return step.params()


@pytest.mark.parametrize(
    ("optimizer", "others"),
    [("adam", (3,)), *(pytest.param(x, (3, 1), marks=SLOW) for x in ("scheduled", "adam"))],
)
def test_other_servers_go_on_bit_by_bit(
    gangs: dict[int, LocalGang], tmp_path: Path, optimizer: str, others: tuple[int, ...]
) -> None:
    """Saved from two servers by the first worker, restored to three, or to one."""
    data = batches(NUM_STEPS)

    def first(number: int, seat: Any) -> Any:
        with make_step(seat, optimizer=optimizer, size=BATCH // 2) as step:
            state = step.init(jax.random.key(0))
            if number == 1:
                return trained(step, state, number, data)
            with Checkpointer(tmp_path, Every(SAVED)) as saver:
                return trained(step, state, number, data, lambda state: saver.update((state, step.variables)))

    def second(number: int, seat: Any) -> Any:
        with make_step(seat, optimizer=optimizer, size=BATCH // 2) as step:
            state = step.init(jax.random.key(1))
            if number == 0:
                with Checkpointer(tmp_path, Every(SAVED)) as saver:
                    state, _ = saver.restore((step.state_specs, step.variables))
            begun = step.meet(state)
            assert int(begun.step) == SAVED
            return trained(step, begun, number, data[SAVED:])

    expected = team(gangs[2], 2, first)
    for servers in others:
        for found in team(gangs[servers], 2, second):
            assert_close(found, expected[0], exactly=True)


@pytest.mark.parametrize("pushes", [10, pytest.param(30, marks=SLOW)])
def test_saved_while_others_go_on(gangs: dict[int, LocalGang], tmp_path: Path, pushes: int) -> None:
    """Asynchronously, until the other worker has pushed as often: a checkpoint restores what it has saved."""
    pushed, asynchronous = threading.Event(), bx.ParameterServers(staleness=None)

    def first(number: int, seat: Any) -> Any:
        with make_step(seat, asynchronous, size=BATCH // 2) as step:
            state = step.init(jax.random.key(0))
            if number == 1:
                for batch in batches(pushes):
                    state, _ = step.update(state, own_part(batch, number, 2))
                step.finish()
                pushed.set()
                return step.meet(state)
            with Checkpointer(tmp_path, Every(1)) as saver:
                while not pushed.is_set():
                    state, _ = step.update(state, own_part(batches(1)[0], number, 2))
                    saver.update((state, step.variables))
                state = step.meet(state)
                state, _ = step.update(state, own_part(batches(1)[0], number, 2))
                saver.update((state, step.variables))
            return step.params(), int(step._servers.num_updates())

    def second(number: int, seat: Any) -> Any:
        with make_step(seat, asynchronous, size=BATCH // 2) as step:
            state = step.init(jax.random.key(1))
            if number == 0:
                with Checkpointer(tmp_path, Every(1)) as saver:
                    state, _ = saver.restore((step.state_specs, step.variables))
            state = step.meet(state)
            found = step.params(), int(state.step)
            step.meet(state)
            return found

    saved = team(gangs[2], 2, first)[0]
    for params, step in team(gangs[2], 2, second):
        assert_close(params, saved[0], exactly=True)
        assert step == saved[1]


def test_a_checkpoint_waits_for_all_copies(gangs: dict[int, LocalGang]) -> None:
    """The last push of the other worker comes late to one of two copies: both have what was saved, to the bit."""
    released, server = threading.Event(), 1  # which has a copy of the first part

    def late(kind: str, rank: int, fields: Any) -> None:
        """Lets the other worker's last push to that copy wait."""
        if (kind, rank, fields.get("part"), fields.get("step")) == ("push", server, 0, NUM_STEPS - 1):
            assert released.wait(60)

    def releasing(wanted: str) -> Asked:
        """Lets it come when the first worker asks that copy."""

        def asked(kind: str, rank: int, fields: Any) -> None:
            if (kind, rank, fields.get("part")) == (wanted, server, 0):
                released.set()

        return asked

    def work(number: int, seat: Any) -> Any:
        with make_step(seat, bx.ParameterServers(copies=2), size=BATCH // 2) as step:
            if number == 0:  # it waits for that push, or nothing may change from there on
                watch(step, before=releasing("pull"), behind=releasing("hold"))
            else:
                watch(step, before=late)
            state = step.init(jax.random.key(0))
            for batch in batches(NUM_STEPS):
                state, _ = step.update(state, own_part(batch, number, 2))
            saved = step.variables.checkpoint_state() if number == 0 else None
            step.meet(state)
            asking, rows = step._servers._asking, {"table": "words", "start": 0, "stop": WORDS, "every": 1}
            return saved, asking.ask_every(lambda part: asking.packed("copy", part, rows))

    (saved, copies), _ = team(gangs[2], 2, work)
    values = saved["tables"]["tables"]["words"]["rows"]["values"].value
    for part, (one, other) in enumerate(copies):
        np.testing.assert_array_equal(one.arrays["0"], values[part::2])
        for leaf in one.arrays:
            np.testing.assert_array_equal(other.arrays[leaf], one.arrays[leaf])


def test_variables_are_read_and_stay_as_they_are(gangs: dict[int, LocalGang]) -> None:
    """By one worker behind each update: rows that lag are brought up in what it is told alone."""

    def work(number: int, seat: Any) -> Any:
        found = list[Any]()
        with make_step(seat, size=BATCH // 2) as step:
            for reads in ("last", "each"):
                state = step.init(jax.random.key(0))
                for batch in batches(NUM_STEPS):
                    state, _ = step.update(state, own_part(batch, number, 2))
                    if reads == "each" and number == 0:
                        step.params()
                found.append(step.params())
        return found

    for last, each in team(gangs[2], 2, work):
        assert_close(each, last, exactly=True)


def test_who_begins_anew_waits_for_others_that_read(gangs: dict[int, LocalGang]) -> None:
    """The other worker reads when the first one has come to `init`: it finds what was trained."""
    came = threading.Event()

    def work(number: int, seat: Any) -> Any:
        with make_step(seat, size=BATCH // 2) as step:
            state = step.init(jax.random.key(0))
            for batch in batches(2):
                state, _ = step.update(state, own_part(batch, number, 2))
            step.finish()
            step.meet(state)
            if number == 1:
                assert came.wait(60)
                found = step.params()
                step.init(jax.random.key(1))
                return found
            found, meet = step.params(), step._servers.meet

            def bears(kind: str, rank: int, fields: Any) -> None:
                if kind == "bear":
                    came.set()

            def met() -> None:
                came.set()
                meet()

            watch(step, behind=bears)
            step._servers.meet = met
            step.init(jax.random.key(1))
            return found

    trained, found = team(gangs[1], 2, work)
    assert_close(found, trained, exactly=True)
