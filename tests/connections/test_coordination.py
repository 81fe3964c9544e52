"""JAX's coordination service: what its processes see of one another's values, and how waits and the service end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jax.errors import JaxRuntimeError

from braidax.connections.coordination import Coordination
from braidax.errors import CommError, WaitTimeout
from tests.support.comm.stores.servers import coordination_service, free_port
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children

LIMIT = 60.0
TWO = """
import os, sys
import jax
from braidax.errors import CommError, WaitTimeout
from braidax.program.coordination import busy, coordination, say_busy

assert coordination() is None
say_busy("nobody hears this")
process = int(sys.argv[2])
for life, port in enumerate(sys.argv[3:]):
    jax.distributed.initialize(f"{sys.argv[1]}:{port}", 2, process, cluster_detection_method="deactivate")
    service = coordination()
    assert service is coordination() and service.process == process
    mine = [service.numbered("loader"), service.numbered("loader"), service.numbered("stages")]

    def other(folder, key):
        return folder.get(key, meaning="the other", remedy="wait", timeout_seconds=60)

    for number, folder in enumerate(mine):
        folder.set(f"said/{process}", b"%d of %d in %d" % (number, process, life))
        assert other(folder, f"said/{1 - process}") == b"%d of %d in %d" % (number, 1 - process, life)
        assert service.find(f"{('loader/0', 'loader/1', 'stages/0')[number]}/said/{process}") is not None
    say_busy("at first")
    say_busy(f"at work {process}")
    mine[0].set(f"busy/{process}", b"")
    other(mine[0], f"busy/{1 - process}")
    assert busy(service) == {0: b"at work 0", 1: b"at work 1"}
    sums = [mine[1].add("sum", 1) for _ in range(50)]
    mine[1].set(f"sums/{process}", repr(sums).encode())
    both = sums + eval(other(mine[1], f"sums/{1 - process}"))
    assert sorted(both) == list(range(1, 101)) and sums == sorted(sums)
    mine[2].set(f"done/{process}", b"")
    other(mine[2], f"done/{1 - process}")
    jax.distributed.shutdown()
    if process == 0:  # which has run the service; the other may have ended its part first
        try:
            service.set("late", b"")
        except CommError as error:
            print(error)
"""


@pytest.fixture(scope="module")
def service() -> Iterator[Coordination]:
    with coordination_service([], "alone") as found:
        yield found


def test_two_processes_of_jax_see_the_same_values_in_each_life_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children(monkeypatch, *LOAD_AND_SAVE, codes=(TWO,))
    command = [sys.executable, "-c", TWO, "127.0.0.1"]
    ports = [str(free_port()) for _ in range(2)]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen([*command, str(process), *ports], env=environ, stdout=subprocess.PIPE, text=True)
        for process in range(2)
    ]
    try:
        for process, child in enumerate(children):
            told, _ = child.communicate(timeout=LIMIT)
            assert child.returncode == 0
            lines = told.splitlines()
            assert len(lines) == (0 if process else 2)
            for line in lines:
                assert line.startswith("process 0 cannot talk to JAX's coordination service any more (")
                assert line.endswith("or jax.distributed.shutdown was called here")
    finally:
        for child in children:
            child.kill()
            child.wait(LIMIT)


def test_a_value_is_set_once_unless_it_is_said(service: Coordination) -> None:
    values = service.numbered("once")
    values.set("key", b"first")
    with pytest.raises(CommError, match=r"process 0 cannot talk .*ALREADY_EXISTS"):
        values.set("key", b"second")
    assert values.find("key") == b"first"
    values.set("key", b"second", known="keep")
    assert values.find("key") == b"first"
    values.set("key", b"\0\xff", known="replace")
    assert values.find("key") == b"\0\xff"
    values.set("new", b"", known="keep")
    assert values.find("new") == b""


def test_folders_are_read_and_forgotten_as_a_whole(service: Coordination) -> None:
    values = service.numbered("folders")
    for key in ("a/1", "a/2", "a/b/3", "a2", "c"):
        values.set(key, key.encode())
    assert values.below("a") == {"1": b"a/1", "2": b"a/2", "b/3": b"a/b/3"}
    assert values.under("a").below() == values.below("a")
    values.delete("a")
    assert values.below() == {"a2": b"a2", "c": b"c"}
    values.delete("c")
    assert values.below() == {"a2": b"a2"}
    values.under("a").set("1", b"again")
    assert values.find("a/1") == b"again"


def test_folders_are_numbered_by_name(service: Coordination) -> None:
    first, second, other = service.numbered("n"), service.numbered("n"), service.under("m").numbered("n")
    for at, folder in enumerate((first, second, other)):
        folder.set("key", b"%d" % at)
    assert service.below("n") == {"0/key": b"0", "1/key": b"1"}
    assert service.below("m") == {"n/0/key": b"2"}
    assert service.under("m").numbered("n").below() == {}


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.35])
def test_a_wait_ends_in_time_and_says_what_for(service: Coordination, seconds: float) -> None:
    begun = time.monotonic()
    with pytest.raises(WaitTimeout) as caught:
        service.get("never", meaning="process 1 to say so", remedy="start it", timeout_seconds=seconds)
    assert seconds <= time.monotonic() - begun < seconds + 5
    assert str(caught.value) == f"process 0 has waited {seconds:g} s for process 1 to say so: start it"
    assert service.find("never", timeout_seconds=seconds) is None


def test_a_wait_hears_of_another_thread(service: Coordination) -> None:
    values = service.numbered("late")
    checked: list[int] = []
    setting = threading.Thread(target=lambda: (_until(lambda: len(checked) >= 2), values.set("key", b"late")))
    setting.start()
    found = values.get("key", meaning="it", remedy="-", timeout_seconds=LIMIT, check=lambda: checked.append(0))
    setting.join(LIMIT)
    assert found == b"late"


def test_what_a_check_raises_ends_a_wait(service: Coordination) -> None:
    def check() -> None:
        raise LookupError("enough")

    begun = time.monotonic()
    with pytest.raises(LookupError, match="enough"):
        service.find("never", timeout_seconds=LIMIT, check=check)
    assert time.monotonic() - begun < LIMIT / 2


def test_an_interrupt_ends_a_wait(service: Coordination) -> None:
    begun = time.monotonic()
    interrupting = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        service.find("never", timeout_seconds=LIMIT)
    interrupting.join()
    assert time.monotonic() - begun < LIMIT / 2


class Ended:
    """The client of a service whose process is gone."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            raise JaxRuntimeError("UNAVAILABLE: connection refused\nRPC: more, such as NOT_FOUND or DEADLINE_EXCEEDED")

        return call


@pytest.mark.usefixtures("unchecked")  # from Python 3.12 on a protocol looks past __getattr__
@pytest.mark.parametrize(
    "call",
    [
        lambda values: values.set("key", b""),
        lambda values: values.set("key", b"", known="keep"),
        lambda values: values.find("key"),
        lambda values: values.find("key", timeout_seconds=LIMIT),
        lambda values: values.get("key", meaning="-", remedy="-", timeout_seconds=LIMIT),
        lambda values: values.below("key"),
        lambda values: values.add("key"),
        lambda values: values.delete("key"),
    ],
)
def test_a_service_that_has_ended_is_an_error_at_once(call: Callable[[Coordination], object]) -> None:
    begun = time.monotonic()
    with pytest.raises(CommError) as caught:
        call(Coordination(Ended(), 3))  # pyright: ignore[reportArgumentType]
    assert time.monotonic() - begun < LIMIT / 2
    assert str(caught.value) == (
        "process 3 cannot talk to JAX's coordination service any more (UNAVAILABLE: connection refused): process 0, or "
        "another one, has ended, and its log says why; or jax.distributed.shutdown was called here"
    )
    assert isinstance(caught.value.__cause__, JaxRuntimeError)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    pause = threading.Event()
    while not holds() and time.monotonic() < deadline:
        pause.wait(0.01)
