"""Ctrl-C at every place of a call at which Python looks for signals: what the other rank is told.

`python -m tests.support.comm.injection TRANSPORT PART [CALL …]` says how often each call was interrupted, at every so
manieth place, and what went wrong. It is a process of its own, in which nothing but braidax itself stands around its
functions.
"""

import dis
import functools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

import braidax
from braidax.comm import Communicator, MemoryStore, connect
from braidax.errors import CommError
from tests.support.comm.ranks import transports

LIMIT_SECONDS = 20.0  # of a wait
AT_ONCE_SECONDS = 4.0
DONE = 77  # a tag
SOURCE = str(Path(braidax.__file__).parent)
CALLED = {str(Path(SOURCE, "comm", name)) for name in ("communicator.py", "starting.py")}
PASSED_ON = {"run", "_split", "_begin", "send", "recv", "ask"}  # which those call last
LOOKED_AT = "again"  # whose result they look at first
LIBRARY = str(Path(threading.__file__).parent)

Place = tuple[str, int, str, int]
"""A file, the first line of a function, its name, and the offset of an instruction."""


@functools.cache
def offsets(code: CodeType) -> frozenset[int]:
    """Returns the instructions before which a signal is heard: behind calls, where functions and loops begin.

    Behind a call its own handlers get what a signal raises: where the next instruction has others, it stands for none.
    """
    handlers = dis.Bytecode(code).exception_entries
    passes_on = code.co_filename in CALLED and not PASSED_ON.isdisjoint(code.co_names)
    passed = ("RETURN_VALUE", "POP_TOP", *(("STORE_FAST",) if LOOKED_AT in code.co_names else ()))
    found: set[int] = set()
    heard: int | None = None
    for instruction in dis.get_instructions(code):
        if passes_on and instruction.opname in passed:
            heard = None  # behind the call of a function in Python no signal is heard
        same = heard is not None and not [
            entry
            for entry in handlers
            if (entry.start <= heard < entry.end) != (entry.start <= instruction.offset < entry.end)
        ]
        if same or instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.offset)
        is_heard = instruction.opname in ("RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW")
        heard = instruction.offset if is_heard else None
    return frozenset(found)


@dataclass
class Injection:
    """Notes the places that a thread passes, and raises KeyboardInterrupt at one of them.

    **Arguments:** `at`: where; nowhere by default. `turn`: the how manieth time that it is passed.
    """

    at: Place | None = None
    turn: int = 1
    passed: dict[Place, int] = field(default_factory=dict)
    is_done: bool = False
    is_lived_through: bool = False

    def __enter__(self) -> "Injection":
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE) and (not name.startswith(LIBRARY) or "site-packages" in name):
            return None
        if name.endswith("weakref.py"):  # Python itself drops what callbacks of the garbage collector raise
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._pass

    def _pass(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "opcode" and frame.f_lasti in offsets(code):
            place = (code.co_filename, code.co_firstlineno, code.co_name, frame.f_lasti)
            self.passed[place] = self.passed.get(place, 0) + 1
            if place == self.at and self.passed[place] == self.turn:
                self.is_done = True
                raise KeyboardInterrupt
        return self._pass


def step(comm: Communicator, call: Callable[[], Any]) -> Any:
    """Makes one of several calls: again, if Ctrl-C came before it had begun, or behind its end."""
    try:
        return call()
    except KeyboardInterrupt:
        if comm._progress.failure is not None:
            raise
        injected_here().is_lived_through = True
        return call()


def check(found: Any, expected: Any) -> None:
    assert np.array_equal(found, expected), (found, expected)


def send(comm: Communicator, count: int = 3, buffers: bool = False, source: int = 0) -> None:
    place = np.empty(count)
    if comm.rank == source:
        (comm.send_buffer if buffers else comm.send)(np.arange(count, dtype=float), 1 - source)
    elif buffers:
        assert comm.recv_buffer(place, source) == place.nbytes
        check(place, np.arange(count))
    else:
        check(comm.recv(source), np.arange(count))


def begun(comm: Communicator, count: int = 3) -> None:
    first = step(comm, lambda: comm.start.all_reduce(np.ones(count)))
    second = step(comm, lambda: comm.start.all_gather(np.array([comm.rank])))
    check(step(comm, second.wait), [[0], [1]])
    check(step(comm, first.wait), np.full(count, 2.0))


def begun_between_two(comm: Communicator, count: int = 3) -> None:
    other = 1 - comm.rank
    received = step(comm, lambda: comm.start.recv(other))
    sent = step(comm, lambda: comm.start.send(np.full(count, comm.rank), other))
    check(step(comm, received.wait), np.full(count, other))
    step(comm, sent.wait)


def split(comm: Communicator) -> None:
    half = step(comm, lambda: comm.split(0, key=-comm.rank))
    check(step(comm, lambda: half.all_gather(np.array([comm.rank]))), [[1], [0]])


def following(comm: Communicator) -> None:
    """Another thread of the rank moves the messages."""
    if comm.rank:
        time.sleep(0.02)
        comm.send(np.arange(3), 0)
        comm.send(b"", 0, tag=DONE + 1)
        return
    failed: list[BaseException] = []
    begun = threading.Event()

    def lead() -> None:
        try:
            begun.set()
            comm.recv(1, tag=DONE + 1)
        except CommError as error:
            failed.append(error)

    thread = threading.Thread(target=lead, daemon=True)
    thread.start()
    begun.wait()
    time.sleep(0.005)
    with injected_here():
        found = step(comm, lambda: comm.recv(1))
    check(found, np.arange(3))
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()


CALLS: dict[str, Callable[[Communicator], None]] = {
    "barrier": lambda comm: comm.barrier(),
    "broadcast": lambda comm: check(comm.broadcast(np.arange(3) if comm.rank == 0 else b""), np.arange(3)),
    "broadcast from the other": lambda comm: check(comm.broadcast(np.arange(3 * comm.rank), root=1), np.arange(3)),
    "gather": lambda comm: check(comm.gather(np.array([comm.rank])), [] if comm.rank else [[0], [1]]),
    "all_gather": lambda comm: check(comm.all_gather(np.array([comm.rank])), [[0], [1]]),
    "all_gather of much": lambda comm: check(comm.all_gather(np.full(40_000, comm.rank)), [[0] * 40_000, [1] * 40_000]),
    "reduce": lambda comm: check(comm.reduce(np.ones(3)), [] if comm.rank else [2.0] * 3),
    "all_reduce": lambda comm: check(comm.all_reduce(np.ones(3)), [2.0] * 3),
    "all_reduce of much": lambda comm: check(comm.all_reduce(np.ones(40_000)), [2.0] * 40_000),
    "reduce_scatter": lambda comm: check(comm.reduce_scatter(np.ones(4)), [2.0, 2.0]),
    "all_to_all": lambda comm: check(comm.all_to_all([np.array([comm.rank])] * 2), [[0], [1]]),
    "send": send,
    "send of much": lambda comm: send(comm, 800_000),
    "recv": lambda comm: send(comm, source=1),
    "recv of much": lambda comm: send(comm, 800_000, source=1),
    "send_buffer": lambda comm: send(comm, buffers=True),
    "recv_buffer": lambda comm: send(comm, buffers=True, source=1),
    "recv_buffer of much": lambda comm: send(comm, 800_000, buffers=True, source=1),
    "begun": begun,
    "begun with much": lambda comm: begun(comm, 40_000),
    "begun between two": begun_between_two,
    "begun between two with much": lambda comm: begun_between_two(comm, 40_000),
    "split": split,
    "following": following,
}
_here = threading.local()


def injected_here() -> Injection:
    """Returns the injection of this thread's rank."""
    return getattr(_here, "injection", Injection())


def trial(name: str, transport: str, injection: Injection, late_seconds: float) -> str:
    """Runs a call on two ranks, the first one of which is interrupted. **Returns:** what is wrong, if anything is."""
    store, chosen, call = MemoryStore(), transports(transport, 2), CALLS[name]
    told: list[BaseException | None] = [None, None]
    failures: list[CommError | None] = []

    def first(comm: Communicator) -> None:
        if _interrupted(comm, call, injection) and comm._progress.failure is None:
            call(comm)  # as if it had come before the call
        failures.append(comm._progress.failure)
        if failures[0] is None:
            comm.send(b"", 1, tag=DONE)

    def other(comm: Communicator) -> None:
        time.sleep(late_seconds)
        call(comm)
        comm.recv(0, tag=DONE)

    def rank_main(rank: int) -> None:
        comm: Communicator | None = None
        try:
            comm = connect(store, rank=rank, size=2, transport=chosen[rank], timeout_seconds=LIMIT_SECONDS)
            (other if rank else first)(comm)
        except BaseException as error:  # noqa: BLE001 (it is told to who runs this)
            told[rank] = error
        finally:
            if comm is not None:
                comm.close()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    for thread in threads:
        thread.join(max(0.0, began + AT_ONCE_SECONDS - time.monotonic()))
    if hanging := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        return f"ranks {hanging} did not end, and had {told}"
    if told[0] is not None:
        return f"it has {told[0]!r}"
    if failures[0] is None:
        return f"the other rank has {told[1]!r}" if told[1] is not None else ""
    if not isinstance(told[1], CommError) or "KeyboardInterrupt" not in str(told[1]):
        return f"the other rank has {told[1]!r}"
    return ""


def _interrupted(comm: Communicator, call: Callable[[Communicator], None], injection: Injection) -> bool:
    """Makes a call. **Returns:** whether it was interrupted."""
    _here.injection = injection
    try:
        if call is following:
            call(comm)
        else:
            with injection:
                call(comm)
    except KeyboardInterrupt:
        return True
    finally:
        _here.injection = Injection()
    assert injection.is_lived_through or not injection.is_done, "the interrupt was swallowed"
    return False


def trials(name: str, transport: str, *, part: int = 1, late: tuple[float, ...] = (0.0, 0.02)) -> tuple[int, list[str]]:
    """Interrupts a call wherever it passes, the first time and the last one.

    **Arguments:** `part`: only at every so manieth place, and at the last ones. `late`: how much later the other rank
    calls, so that the first one waits, or does not.

    **Returns:** how often it was interrupted, and what went wrong.
    """
    num_done, wrong = 0, list[str]()
    for late_seconds in late:
        first = Injection()
        if said := trial(name, transport, first, late_seconds):
            return 0, [f"{name}: not interrupted: {said}"]
        places = list(first.passed.items())
        for place, turns in {**dict(places[::part]), **dict(places[-3:])}.items():
            for turn in {1, turns}:
                injection = Injection(place, turn)
                said = trial(name, transport, injection, late_seconds)
                num_done += injection.is_done
                if said:
                    wrong.append(f"{name} over {transport}, {_words(place)} ({turn}): {said}")
    return num_done, wrong


def _words(place: Place) -> str:
    path, line, function, offset = place
    return f"{Path(path).name}:{line} {function}+{offset}"


def main(transport: str, part: str, *names: str) -> int:
    """Interrupts calls, all by default, and says how often."""
    num_wrong = 0
    for name in names or CALLS:
        num_done, wrong = trials(name, transport, part=int(part))
        num_wrong += len(wrong)
        sys.stdout.write("".join(f"{line}\n" for line in wrong))
        sys.stdout.write(f"{name}: interrupted {num_done} times, {len(wrong)} wrong\n")
        sys.stdout.flush()
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
