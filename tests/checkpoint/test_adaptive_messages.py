"""Processes agree on when checkpoints are due: process 0 tells the others ahead."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
from jax.errors import JaxRuntimeError

from braidax.checkpoint.interval.adaptive import Adapting, Adaptive
from braidax.checkpoint.interval.adaptive_messages import Announcements
from braidax.checkpoint.interval.spacing import Spacing
from braidax.connections.coordination import Coordination
from braidax.errors import ArgumentError, CheckpointError, CommError, WaitTimeout
from tests.support.comm.stores.servers import free_port
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children

LIMIT = 60
REAL = """
import sys
import jax
from braidax.checkpoint.interval.adaptive_messages import Announcements
from braidax.errors import WaitTimeout
from braidax.program.coordination import coordination

jax.distributed.initialize(sys.argv[1], 1, 0)
service = coordination()
run = service.under("a/run")
first, second, third = (Announcements(run, process=i, timeout_seconds=0.2) for i in range(3))
Announcements(service.under("a/run2"), process=0, timeout_seconds=0.2).tell(b"another run")
heard = [second.hear()]
try:
    third.wait()
except WaitTimeout as error:
    print(str(error)[:47])
for number in range(20):
    first.tell(bytes([number]))
    if number in (2, 3, 15):
        heard.append(second.hear())
    if number < 3:
        heard.append(third.wait())
heard.append(second.hear())
print(heard)
print(len(run.below()))
jax.distributed.shutdown()
"""


class Service:
    """A coordination service in one process, without waits; counts what is asked of it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_asked = 0
        self.is_dead = False

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        self._ask()
        assert key not in self.values
        self.values[key] = value

    def key_value_try_get_bytes(self, key: str) -> bytes:
        raise NotImplementedError

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        self._ask()
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        self._ask()
        if key not in self.values:
            raise JaxRuntimeError("DEADLINE_EXCEEDED: not yet")
        return self.values[key]

    def key_value_increment(self, key: str, increment: int) -> int:
        raise NotImplementedError

    def key_value_delete(self, key: str) -> None:
        self._ask()
        del self.values[key]

    def _ask(self) -> None:
        self.num_asked += 1
        if self.is_dead:
            raise JaxRuntimeError("UNAVAILABLE: connection refused\nmore")


class Process:
    """One of several processes that make the same steps, in the simulated time of all."""

    def __init__(self, service: Service, process: int, seed: int) -> None:
        self.now = 0.0
        self.num_updates = 0
        self.checkpoints: list[int] = []
        self.durable_at: float | None = None
        self.random = random.Random(seed)
        folder = Coordination(service, process, prefix="run")
        announcements = Announcements(folder, process=process, timeout_seconds=0.01)
        self.spacing: Spacing = Adaptive().start(0, announcements=announcements, clock=lambda: self.now)

    def update(self, step_seconds: float, stall_seconds: float) -> None:
        self.now += step_seconds * max(0.2, 1 + 0.2 * self.random.gauss(0, 1))
        self.num_updates += 1
        if self.durable_at is not None and self.now >= self.durable_at:
            self.durable_at = None
            self.spacing.ended()
        if self.spacing.due(self.num_updates):
            if self.durable_at is not None:  # the checkpointer waits for it
                self.now = max(self.now, self.durable_at)
                self.spacing.ended()
            self.now += stall_seconds
            self.durable_at = self.now + 0.5
            self.spacing.began()
            self.spacing.stalled(stall_seconds)
            self.checkpoints.append(self.num_updates)


@pytest.mark.parametrize("step_seconds", [0.002, 0.1, 1.0])
def test_processes_that_run_ahead_of_one_another_agree(step_seconds: float) -> None:
    service = Service()
    first, *others = processes = [Process(service, process, seed=process) for process in range(3)]
    order = random.Random(0)
    stall_seconds = step_seconds
    while first.num_updates < 4000:
        slowest = min(process.num_updates for process in processes)
        process = order.choice([process for process in processes if process.num_updates < slowest + 8])
        if first.num_updates == 2000:
            stall_seconds = 4 * step_seconds
        process.update(step_seconds, stall_seconds)
    together = min(process.num_updates for process in processes)
    agreed = [number for number in first.checkpoints if number <= together]
    assert len(agreed) >= 10
    for other in others:
        assert [number for number in other.checkpoints if number <= together] == agreed
        assert other.spacing.verdict.step_seconds == pytest.approx(step_seconds, rel=0.1)
    # A message every 16 updates at most, which each process fetches in one or two calls.
    assert service.num_asked < 4000 / 16 * (2 + 2 * 3)
    assert len(service.values) <= 16


def test_agreed_checkpoints_keep_the_budget() -> None:
    first = Process(Service(), 0, seed=0)
    for _ in range(6000):
        first.update(0.1, 0.2)
    assert 0.02 < len(first.checkpoints) * 0.2 / 600.0 < 0.04
    assert first.checkpoints[0] < 64


def test_steps_that_are_dispatched_in_no_time_do_not_put_it_off() -> None:
    first = Process(Service(), 0, seed=0)
    for _ in range(20):
        first.update(1e-5, 0.0)
    for _ in range(600):
        first.update(0.1, 0.1)
    assert first.checkpoints[0] < 100
    assert len(first.checkpoints) > 3


def test_what_is_set_on_process_0_holds_for_all() -> None:
    service = Service()
    first, other = Process(service, 0, seed=0), Process(service, 1, seed=1)
    first.spacing.paused = True
    first.spacing.num_updates = 7
    for _ in range(200):
        first.update(0.1, 0.0)
        other.update(0.1, 0.0)
    assert first.checkpoints == other.checkpoints == list(range(17, 201, 7))
    assert (other.spacing.num_updates, other.spacing.verdict.bound, other.spacing.paused) == (7, "set", True)
    with pytest.raises(ArgumentError, match=r"num_updates=3: process 1 follows process 0 .* set it there"):
        other.spacing.num_updates = 3
    with pytest.raises(ArgumentError, match="paused=False: process 1 follows"):
        other.spacing.paused = False


def test_who_is_far_ahead_waits_and_says_for_whom() -> None:
    service = Service()
    first, other = Process(service, 0, seed=0), Process(service, 1, seed=1)
    first.update(0.1, 0.0)
    with pytest.raises(
        WaitTimeout, match=r"process 1 has waited 0\.01 s for process 0.*left the loop.*timeout_seconds="
    ):
        for _ in range(100):
            other.update(0.1, 0.0)
    assert 17 < other.num_updates < 50


def test_who_is_too_far_behind_is_told() -> None:
    service = Service()
    first, other = Process(service, 0, seed=0), Process(service, 1, seed=1)
    for _ in range(1000):
        first.update(0.1, 0.0)
    with pytest.raises(CheckpointError, match=r"process 1 is too far behind process 0, which has told \d+ times"):
        for _ in range(17):
            other.update(0.1, 0.0)
    assert other.checkpoints == []


def test_a_service_that_is_gone_is_an_error() -> None:
    service = Service()
    service.is_dead = True
    for process in (0, 1):
        other = Process(service, process, seed=0)
        with pytest.raises(CommError, match=rf"process {process} cannot talk .* \(UNAVAILABLE: connection refused\)"):
            for _ in range(17):
                other.update(0.1, 0.0)
    with pytest.raises(CommError, match="process 1 cannot talk"):
        Announcements(Coordination(service, 1), process=1, timeout_seconds=1.0).wait()


def test_process_0_measures() -> None:
    announcements = Announcements(Coordination(Service(), 0), process=0, timeout_seconds=1.0)
    assert isinstance(Adaptive().start(0, announcements=announcements), Adapting)


def test_over_the_service_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children(monkeypatch, *LOAD_AND_SAVE, codes=(REAL,))
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", REAL, f"127.0.0.1:{free_port()}"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=True)
    numbers = [bytes([number]) for number in range(20)]
    heard = [[], *numbers[:2], numbers[:3], numbers[2], numbers[3:4], numbers[4:16], numbers[16:]]
    assert ended.stdout == f"process 0 has waited 0.2 s for process 0, which\n{heard}\n16\n"
