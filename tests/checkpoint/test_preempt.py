"""`Preemption`: SIGTERM is kept for the loop, given back, and agreed on by processes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from braidax.checkpoint.interval import preempt
from braidax.checkpoint.interval.preempt import Preemption
from braidax.errors import ArgumentError, CheckpointError
from tests.support.comm.stores.servers import free_port
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children

LIMIT = 60

ENDED_TWICE = """
import os, signal
from braidax.checkpoint.interval.preempt import Preemption

with Preemption() as preemption:
    os.kill(os.getpid(), signal.SIGTERM)
    print(preemption.due(1), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("alive", flush=True)
"""

RANK = """
import sys, time
import jax
from braidax.checkpoint.interval.preempt import Preemption

rank = int(sys.argv[2])
jax.distributed.initialize(sys.argv[1], 2, rank)
with Preemption(within_seconds=20.0) as preemption:
    print("began", flush=True)
    step = 0
    while not preemption.due(step):
        step += 1
        time.sleep(0.01 + 0.01 * rank)  # which is what this step computes
    print(step, preemption.due(step), preemption.due(step + 1), preemption.seconds_left > 19.0, flush=True)
sys.stdin.readline()
"""

OFF = """
import sys
import jax
from braidax.checkpoint.interval.preempt import Preemption
from braidax.errors import CheckpointError

jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(sys.argv[1], 1, 0)
with Preemption() as preemption:
    try:
        preemption.due(1)
    except CheckpointError as error:
        print(error)
jax.distributed.shutdown()
"""


@pytest.fixture(scope="module", autouse=True)
def programs_are_forks() -> Iterator[None]:
    """Lets programs begin with what they import."""
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch, *LOAD_AND_SAVE, codes=(ENDED_TWICE, RANK, OFF))
        yield


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What the handler hears that was there before."""
    numbers: list[int] = []

    def handler(number: int, frame: Any) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    yield numbers
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, before)


def test_without_a_signal_nothing_is_due_and_the_handler_comes_back(heard: list[int]) -> None:
    with Preemption(within_seconds=5.0) as preemption:
        assert not preemption.due(1)
        assert preemption.seconds_left == 5.0
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_the_first_signal_is_kept_and_the_second_is_for_whoever_had_it(
    heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(preempt.time, "monotonic", lambda: now)
    with Preemption(within_seconds=5.0) as preemption:
        signal.raise_signal(signal.SIGTERM)
        assert heard == []
        now = 102.0
        assert preemption.due(1)
        assert preemption.due(2)
        assert preemption.seconds_left == 3.0
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        now = 106.0
        assert preemption.seconds_left == 0.0
    assert preemption.due(3)


def test_blocks_may_be_nested(heard: list[int]) -> None:
    with Preemption() as outer:
        with Preemption() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (inner.due(1), outer.due(1)) == (True, False)
        signal.raise_signal(signal.SIGTERM)
        assert outer.due(1)
    assert heard == []


def test_on_another_thread_signals_are_left_alone(heard: list[int]) -> None:
    due: list[bool] = []

    def loop() -> None:
        with Preemption() as preemption:
            reached.set()
            assert told.wait(LIMIT)
            due.append(preemption.due(1))

    reached, told = threading.Event(), threading.Event()
    thread = threading.Thread(target=loop)
    thread.start()
    assert reached.wait(LIMIT)
    signal.raise_signal(signal.SIGTERM)
    told.set()
    thread.join(LIMIT)
    assert (due, heard) == ([False], [signal.SIGTERM])


def test_a_handler_that_could_not_be_given_back_is_an_error(monkeypatch: pytest.MonkeyPatch, heard: list[int]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)
        with pytest.raises(CheckpointError, match="SIGTERM is handled by something that is not Python"), Preemption():
            pass


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_kept(seconds: float) -> None:
    with pytest.raises(ArgumentError, match=f"within_seconds={seconds}: expected a finite number of seconds > 0"):
        Preemption(within_seconds=seconds)


def run(code: str, *arguments: str) -> "subprocess.Popen[str]":
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_second_signal_ends_the_process_at_once() -> None:
    with run(ENDED_TWICE) as process:
        assert process.communicate(timeout=LIMIT)[0] == "True\n"
        assert process.returncode == -signal.SIGTERM


def test_processes_agree_on_the_step_when_one_of_them_is_told() -> None:
    address = f"127.0.0.1:{free_port()}"
    with run(RANK, address, "0") as first, run(RANK, address, "1") as second:
        try:
            for process in (first, second):
                assert process.stdout is not None
                assert process.stdout.readline() == "began\n"
            second.send_signal(signal.SIGTERM)
            assert first.stdout is not None
            assert second.stdout is not None
            told = first.stdout.readline()
            assert told == second.stdout.readline()
            step, *answers = told.split()
            assert int(step) > 0
            assert answers == ["True", "True", "True"]
            # JAX swallows the signal before; now it ends them.
            for process in (first, second):
                process.send_signal(signal.SIGTERM)
                assert process.wait(LIMIT) == -signal.SIGTERM
        finally:
            first.kill()
            second.kill()


def test_a_service_that_is_off_is_an_error() -> None:
    with run(OFF, f"127.0.0.1:{free_port()}") as process:
        told, log = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, log
    assert told.startswith("processes cannot agree on a last checkpoint: Preemption sync manager has not been")
    assert "Expected the option jax_enable_preemption_service to be on" in told
