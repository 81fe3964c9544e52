"""Servers that are lost while training: with copies nothing is lost with them, whenever it happens."""

import functools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.errors import ArgumentError, PeerLost
from braidax.gang import LocalGang
from braidax.parallel.given.arrays import place
from tests.support.parallel.models import copied
from tests.support.parallel.served.losing import OPTIMIZERS, assert_equal, make_step, own_pid
from tests.support.parallel.served.models import zipf_batches

NUM_STEPS = 24


def trained(step: Any, killed: Any = lambda number: None) -> Any:
    """Trains, and returns all losses and the dense state. **Arguments:** `killed`: is told of each step."""
    state, losses = step.init(jax.random.key(0)), list[float]()
    placed = [place(batch, step.batch_shardings) for batch in zipf_batches(NUM_STEPS)]
    for number, (batch, coming) in enumerate(zip(placed, [*placed[1:], None], strict=True)):
        killed(number)
        state, metrics = step.update(state, batch, coming=coming)
        losses.append(float(metrics["loss"]))
    return losses, copied(step.to_dense(state))


@pytest.fixture(scope="module")
def expected(gangs: dict[int, LocalGang]) -> Callable[[str], Any]:
    """What training by an optimizer comes to that loses nothing."""

    @functools.cache
    def found(optimizer: str) -> Any:
        with make_step(gangs[3], optimizer, copies=1) as step:
            return trained(step)

    return found


def drawn_cases(optimizer: str, num_seeds: int) -> list[Any]:
    """Pairs of all optimizers and seeds. **Arguments:** `optimizer`: with the first seed it is not slow."""
    pairs = [(name, seed) for name in OPTIMIZERS for seed in range(num_seeds)]
    return [pair if pair == (optimizer, 0) else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.slow  # test_replaced.py has two that are lost, and others in their place
@pytest.mark.parametrize(("optimizer", "seed"), drawn_cases("clipped", 40))
def test_a_lost_server_changes_no_bit(expected: Callable[[str], Any], optimizer: str, seed: int) -> None:
    """One of three, at a step or a moment that the seed draws; and another one that has no part without a copy."""
    drawn, wanted = random.Random(seed), expected(optimizer)
    with LocalGang(3) as gang:
        pids = gang.run(own_pid)
        first, at = drawn.randrange(3), drawn.randrange(NUM_STEPS)
        timers = list[threading.Timer]()

        def kill(number: int) -> None:
            if number == at:
                timers.append(threading.Timer(drawn.uniform(0, 0.01), os.kill, (pids[first], signal.SIGKILL)))
                timers[-1].start()

        with make_step(gang, optimizer) as step:
            found = trained(step, kill)
        for timer in timers:
            timer.join()
    assert_equal(found, wanted)


@pytest.mark.usefixtures("mended")
def test_without_a_copy_it_ends_and_goes_on_from_the_checkpoint(gangs: dict[int, LocalGang], tmp_path: Path) -> None:
    """Both servers of a part are lost: an error that says so; the gang is mended, and training comes to the same."""
    gang = gangs[2]
    with Checkpointer(tmp_path, Every(5)) as saver:
        with make_step(gang, "adagrad") as step:
            wanted = trained(step)
        pids = gang.run(own_pid)
        placed = [place(batch, step.batch_shardings) for batch in zipf_batches(NUM_STEPS)]
        losses = list[float]()
        with pytest.raises(PeerLost, match="and all 2 copies of what it had"), make_step(gang, "adagrad") as step:
            state = step.init(jax.random.key(0))
            for number, batch in enumerate(placed):
                if number == 12:
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                state, metrics = step.update(state, batch)
                saver.update((state, step.tables))
        gang.replace()
        with make_step(gang, "adagrad") as step:
            state, _ = saver.restore((step.state_specs, step.tables))
            begun = int(state.step)
            assert begun in (5, 10)
            for batch in placed[begun:]:
                state, metrics = step.update(state, batch)
                losses.append(float(metrics["loss"]))
            assert_equal((losses, copied(step.to_dense(state))), (wanted[0][begun:], wanted[1]))


@pytest.mark.slow  # spare servers take the place of a lost one in test_resizing.py, of two in test_growing_moves.py
@pytest.mark.parametrize(("optimizer", "seed"), drawn_cases("adagrad", 20))
def test_spare_servers_take_the_place_of_lost_ones(expected: Callable[[str], Any], optimizer: str, seed: int) -> None:
    """Of three servers with parts all are lost, one after the other: three spare ones have what they had."""
    drawn, wanted = random.Random(seed), expected(optimizer)
    steps = sorted(drawn.sample(range(1, NUM_STEPS - 3, 4), 3))  # in between the place of one is taken
    with LocalGang(6) as gang:
        pids = gang.run(own_pid)
        order = drawn.sample(range(3), 3)

        def kill(number: int) -> None:
            if number in steps:
                os.kill(pids[order[steps.index(number)]], signal.SIGKILL)

        with make_step(gang, optimizer, spares=3) as step:
            found = trained(step, kill)
            having = step._servers._asking.having
    assert {rank for ranks in having for rank in ranks} == {3, 4, 5}
    assert_equal(found, wanted)


def test_more_copies_than_servers(gangs: dict[int, LocalGang]) -> None:
    with pytest.raises(ArgumentError, match="copies=2 of Served, and there are 1 servers"):
        make_step(gangs[1], "adagrad")
    with pytest.raises(ArgumentError, match="there are 1 servers and 1 spare ones"):
        make_step(gangs[2], "adagrad", spares=1)
    with pytest.raises(ArgumentError, match="spares=-1: expected a number of servers, 0 or more"):
        bx.Served(spares=-1)
