"""Checkpoints of what servers have of a run of workers."""

import threading
from pathlib import Path
from typing import Any

import jax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.gang import LocalGang
from tests.support.parallel.workers.teams import BATCH, assert_close, batches, make_step, own_part, team

NUM_STEPS, SAVED = 8, 5
SLOW = pytest.mark.slow


def trained(step: Any, state: Any, number: int, data: list[Any], after: Any = lambda state: None) -> Any:
    for batch in data:
        state, _ = step.update(state, own_part(batch, number, 2))
        after(state)
    return step.params()


@pytest.mark.parametrize(
    ("optimizer", "others"),
    [("scheduled", (3,)), *(pytest.param(x, (3, 1), marks=SLOW) for x in ("scheduled", "adam"))],
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


def test_saved_while_others_go_on(gangs: dict[int, LocalGang], tmp_path: Path) -> None:
    """Asynchronously, until the other worker has pushed thirty times: a checkpoint restores what it has saved."""
    pushed, asynchronous = threading.Event(), bx.ParameterServers(staleness=None)

    def first(number: int, seat: Any) -> Any:
        with make_step(seat, asynchronous, size=BATCH // 2) as step:
            state = step.init(jax.random.key(0))
            if number == 1:
                for batch in batches(30):
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
