"""What fails inside a call, Ctrl-C included: all ranks are told at once, and nothing later is taken for another."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.comm.condition import Condition
from braidax.comm.transports import tcp_link
from braidax.errors import Aborted, ArgumentError, CommError
from tests.support.comm.injection import CALLS, Injection
from tests.support.comm.ranks import in_turns, outcomes
from tests.support.comm.transports.tcps import IN_PYTHON
from tests.support.tree import ROOT

TRANSPORTS = ["in-process", "tcp", "ucx"]
REDUCING = [*TRANSPORTS, IN_PYTHON]
AT_ONCE_SECONDS = 10.0  # on a machine that has more to do; the limit of a wait is 60

Call = Callable[[Communicator], Any]


def overflow(comm: Communicator) -> Any:
    """Fails in the reduction itself, on the rank that asks NumPy to raise, with an error that is none of braidax."""
    with np.errstate(over="raise" if comm.rank == 1 else "ignore"):
        return comm.all_reduce(np.full(40_000, np.finfo(np.float64).max))


def refuse(comm: Communicator) -> Any:
    return comm.reduce_scatter(np.ones(comm.size + (comm.rank == 1)))


def send_nothing(comm: Communicator) -> Any:
    return comm.all_gather(3 if comm.rank == 1 else np.ones(3))


def begin(comm: Communicator) -> Any:
    with np.errstate(over="raise" if comm.rank == 1 else "ignore"):
        return comm.start.all_reduce(np.full(40_000, np.finfo(np.float64).max)).wait()


def check_ended(call: Call, kind: type[Exception], words: str, transport: str) -> None:
    """Fails unless a call fails on rank 1, and the others hear of that at once."""
    start = time.monotonic()
    found = outcomes(3, call, transport=transport)
    assert time.monotonic() - start < AT_ONCE_SECONDS
    assert isinstance(found[1], kind)
    for rank in (0, 2):
        assert isinstance(found[rank], Aborted)
        assert "rank 1 (host " in str(found[rank])
        assert f"ended the generation: {words}" in str(found[rank])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            refuse,
            ArgumentError,
            "reduce_scatter failed: array= has shape (4,): expected dim 0 to be a multiple of",
        ),
        (send_nothing, ArgumentError, "all_gather failed: value= is a int: expected a NumPy array"),
    ],
)
def test_whatever_fails_in_a_collective_ends_the_generation_for_all(
    call: Call, kind: type[Exception], words: str, transport: str, unchecked: None
) -> None:
    check_ended(call, kind, words, transport)


@pytest.mark.parametrize("transport", REDUCING)
def test_a_reduction_that_fails_ends_it(transport: str) -> None:
    check_ended(overflow, FloatingPointError, "all_reduce failed: FloatingPointError: overflow", transport)


@pytest.mark.parametrize("transport", REDUCING)
def test_one_that_was_begun_ends_it_too(transport: str) -> None:
    start = time.monotonic()
    found = outcomes(3, begin, transport=transport)
    assert time.monotonic() - start < AT_ONCE_SECONDS
    for error in found:
        assert isinstance(error, Aborted | FloatingPointError | RuntimeWarning)  # errstate is a thread's own
        assert "overflow" in str(error)


def test_no_collective_meets_an_earlier_one_of_others() -> None:
    """A rank that goes on after an error met the others' earlier `all_reduce(10)`, and all got 120."""

    def go_on(comm: Communicator) -> Any:
        got: list[Any] = []
        if comm.rank == 0:
            with pytest.raises(ArgumentError):
                comm.all_reduce(np.array(["x"]))
        else:
            with pytest.raises(Aborted):
                got.append(comm.all_reduce(np.array([10])))
        got.append(comm.all_reduce(np.array([100])))
        return got

    for error in outcomes(3, go_on):
        assert isinstance(error, Aborted)
        assert "all_reduce failed: array= has dtype=<U1, of which operation=add makes <U2" in str(error)


def test_an_interrupt_amid_a_tcp_message_ends_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the kernel's taking bytes and our noting it: they were sent twice, and no message came after."""
    write, victim = tcp_link.write_some, list[int]()

    def interrupted(connection: Any, parts: list[Any]) -> int:
        count = write(connection, parts)
        if threading.get_ident() in victim:
            victim.clear()
            raise KeyboardInterrupt
        return count

    monkeypatch.setattr(tcp_link, "write_some", interrupted)

    def talk(comm: Communicator) -> Any:
        if comm.rank == 0:
            victim.append(threading.get_ident())
            with pytest.raises(KeyboardInterrupt):
                comm.send(np.arange(1_000_000), 1)
            comm.send(np.arange(3), 1)
            return None
        return [comm.recv(0).tolist()[:3], comm.recv(0).tolist()]

    start = time.monotonic()
    found = outcomes(2, talk, transport=IN_PYTHON)
    assert time.monotonic() - start < AT_ONCE_SECONDS
    for error in found:
        assert isinstance(error, Aborted)
        assert "rank 0 (host " in str(error)
        assert "KeyboardInterrupt" in str(error)


@pytest.mark.parametrize(
    ("call", "transport"), in_turns(["recv", "recv_buffer", "all_reduce", "barrier", "wait"], TRANSPORTS, every=3)
)
def test_ctrl_c_in_a_wait_is_told_to_all(call: str, transport: str) -> None:
    calls: dict[str, Call] = {
        "recv": lambda comm: comm.recv(1),
        "recv_buffer": lambda comm: comm.recv_buffer(bytearray(8), 1),
        "all_reduce": lambda comm: comm.all_reduce(np.ones(50_000)),
        "barrier": lambda comm: comm.barrier(),
        "wait": lambda comm: comm.start.recv(1).wait(),
    }
    main = threading.main_thread()
    assert threading.current_thread() is main
    told: list[BaseException] = []
    begun = threading.Event()

    def first(comm: Communicator) -> Any:
        try:
            begun.set()
            calls[call](comm)
        except BaseException as error:
            told.append(error)
            raise

    def second(comm: Communicator) -> Any:
        begun.wait(30)
        time.sleep(0.05)  # it is most likely asleep in the call by now; nothing depends on it
        signal.pthread_kill(main.ident, signal.SIGINT)
        comm.recv(0, tag=7)

    start = time.monotonic()
    found = outcomes(2, lambda comm: (second if comm.rank else first)(comm), transport=transport, main_rank=0)
    assert time.monotonic() - start < AT_ONCE_SECONDS
    assert isinstance(found[0], KeyboardInterrupt)
    assert isinstance(found[1], CommError)
    assert "rank 0 (host " in str(found[1])
    assert "KeyboardInterrupt" in str(found[1])


def interrupted(transport: str, part: int, *calls: str) -> str:
    """Interrupts calls, in a process of its own. **Returns:** what it says of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.comm.injection", transport, str(part), *calls],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("transport", "call"),
    [("in-process", "all_reduce"), ("tcp", "split"), ("tcp", "following"), ("ucx", "recv_buffer")],
)
def test_ctrl_c_at_any_place_of_a_call_ends_the_generation(transport: str, call: str) -> None:
    """Or it comes before the call has begun anything: then this can be called again."""
    assert ", 0 wrong" in interrupted(transport, 50, call)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_at_every_place_of_every_call(transport: str) -> None:
    assert interrupted(transport, 1).count(", 0 wrong") == len(CALLS)


def test_ctrl_c_at_any_place_of_a_condition_leaves_its_lock_free() -> None:
    """`threading.Condition` leaves it locked for ever, or gives back the lock that another thread holds."""

    def wait(injection: Injection) -> None:
        lock = threading.Lock()
        condition = Condition(lock)
        looked = 0

        def holds() -> bool:
            nonlocal looked
            looked += 1
            return looked == 3

        try:
            with injection:
                while not condition.wait_for(holds, 0.001):
                    pass
        except KeyboardInterrupt:
            assert injection.is_done
        assert lock.acquire(blocking=False)
        assert len(condition) == 0

    whole = Injection()
    wait(whole)
    num_interrupted = 0
    for place, turns in whole.passed.items():
        for turn in range(1, turns + 1):
            injection = Injection(place, turn)
            wait(injection)
            num_interrupted += injection.is_done
    assert num_interrupted > 20


def test_no_call_imports_a_module() -> None:
    """Ctrl-C amid an import can leave the module locked: whoever imports it next waits for ever, as `split` did."""
    program = """
import sys
from tests.support.comm.injection import CALLS
from tests.support.comm.ranks import results

def call_all(comm):
    before = set(sys.modules)
    for name in CALLS:
        if name != "following":
            CALLS[name](comm)
    return set(sys.modules) - before

print(results(2, call_all))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "[set(), set()]\n"
