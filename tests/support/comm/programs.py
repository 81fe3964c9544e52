"""Drawn programs of messages: their results are those of NumPy, or all ranks end with an exact error, in time.

`python -m tests.support.comm.programs TRANSPORT FIRST COUNT` runs those of some seeds, one after the other, with ranks
that are threads. It is a process of its own: Ctrl-C reaches its main thread, and what hangs can be ended. It says what
went wrong, a line for each program, and ends with 1 if anything did.
"""

import collections
import faulthandler
import functools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.random  # not when it is first used: Ctrl-C amid an import can leave the module locked

from braidax.comm import Communicator, MemoryStore, Tuning, connect
from braidax.errors import ArgumentError, BraidaxError, CommError, WaitTimeout
from tests.support.comm.ranks import transports

LIMIT_SECONDS = 20.0  # of a program; of a wait, too, so that what waits in vain is too slow
DTYPES = [np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_, np.complex128, ml_dtypes.bfloat16]
COUNTS = [0, 1, 5, 300, 3000, 40_000, 150_000]
REDUCTIONS = [np.add, np.maximum, np.minimum]
INJECTED = "injected"


class Injected(Exception):
    """What a rank raises because the program says so."""


@dataclass(frozen=True)
class Program:
    """**Fields:** `statements`: names in `STATEMENTS`. `fault`: what happens to `victim` before statement `at`."""

    seed: int
    transport: str
    size: int
    hosts: str
    statements: tuple[str, ...]
    fault: str
    victim: int
    at: int
    delay_seconds: float


def drawn(seed: int, transport: str) -> Program:
    """Returns the program of a seed."""
    draw = random.Random(f"{transport} {seed}")
    size = draw.choice([2, 2, 3, 4])
    statements = [draw.choice(list(STATEMENTS)) for _ in range(draw.randint(2, 7))]
    fault = draw.choice(["", "", *FAULTS, "interrupt", "interrupt"])
    at = draw.randrange(len(statements))
    if fault == "disagree":
        statements[at] = "collective"
    elif fault == "overflow":
        statements[at] = "overflowing"
    return Program(
        seed=seed,
        transport=transport,
        size=size,
        hosts=draw.choice(["", "", "aabb"[:size], "abab"[:size]]),
        statements=tuple(statements),
        fault=fault,
        victim=draw.randrange(size),
        at=at,
        delay_seconds=draw.uniform(0, 0.03),
    )


def data(key: str, rank: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns small whole numbers, whose sums are exact in every dtype."""
    number = random.Random(f"{key} {rank}").randrange(1 << 30)
    return np.random.default_rng(number).integers(0, 9, shape).astype(dtype)


def same(found: Any, expected: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (found.dtype, found.shape)
    assert found.tobytes() == expected.tobytes(), (found.ravel()[:4], expected.ravel()[:4])


def shape_of(draw: random.Random, comm: Communicator) -> tuple[int, ...]:
    count = draw.choice(COUNTS)
    return (comm.size * count,) if draw.random() < 0.5 else (comm.size, count)


def call(comm: Communicator, draw: random.Random, key: str, begin: bool) -> Callable[[], None]:
    """Does or begins a collective. **Returns:** what ends it, and compares it with NumPy."""
    kind = draw.choice(
        [
            "barrier",
            "broadcast",
            "broadcast_into",
            "gather",
            "all_gather",
            "all_to_all",
            "reduce",
            "all_reduce",
            "reduce_scatter",
            "all_to_all_into",
            "all_gather_into",
        ]
    )
    dtype, shape, operation = draw.choice(DTYPES), shape_of(draw, comm), draw.choice(REDUCTIONS)
    root = draw.randrange(comm.size)
    mine = data(key, comm.rank, dtype, shape)
    all_of = [data(key, rank, dtype, shape) for rank in range(comm.size)]
    reduced = functools.reduce(operation, all_of)
    parts = [data(f"{key} {rank}", comm.rank, dtype, shape) for rank in range(comm.size)]
    arguments: dict[str, tuple[Any, ...]] = {
        "barrier": (),
        "broadcast": (mine,),
        "broadcast_into": (mine,),
        "gather": (mine,),
        "all_gather": (mine,),
        "all_to_all": (parts,),
        "all_to_all_into": (np.stack(parts), np.empty((comm.size, *shape), dtype)),
        "all_gather_into": (mine, np.empty((comm.size, *shape), dtype)),
    }
    options: dict[str, Any] = {"root": root} if kind in ("broadcast", "broadcast_into", "gather", "reduce") else {}
    if kind == "all_reduce" and draw.random() < 0.5:
        options = {"out": mine if draw.random() < 0.5 else np.empty_like(mine)}
    doer = getattr(comm.start if begin else comm, kind)
    result = doer(*arguments.get(kind, (mine, operation)), **options)

    def end() -> None:
        found = result.wait() if begin else result
        if kind in ("broadcast", "broadcast_into"):
            same(found, all_of[root])
        elif kind in ("gather", "all_gather", "all_gather_into"):
            expected = all_of if kind != "gather" or comm.rank == root else []
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                same(one, other)
        elif kind in ("all_to_all", "all_to_all_into"):
            for rank, one in enumerate(found):
                same(one, data(f"{key} {comm.rank}", rank, dtype, shape))
        elif kind == "reduce":
            same(found, reduced if comm.rank == root else np.empty(0, dtype))
        elif kind == "all_reduce":
            same(found, reduced)
        elif kind == "reduce_scatter":
            rows = len(reduced) // comm.size
            same(found, reduced[comm.rank * rows : (comm.rank + 1) * rows])

    return end


def collective(comm: Communicator, draw: random.Random, key: str) -> None:
    call(comm, draw, key, begin=False)()


def several_collectives(comm: Communicator, draw: random.Random, key: str) -> None:
    ends = [call(comm, draw, f"{key} {number}", begin=True) for number in range(draw.randint(2, 4))]
    draw.shuffle(ends)
    for end in ends:
        end()


def group(comm: Communicator, draw: random.Random, key: str) -> None:
    colors = [draw.randrange(2) for _ in range(comm.size)]
    members = [rank for rank in range(comm.size) if colors[rank] == colors[comm.rank]]
    half = comm.split(colors[comm.rank])
    asked = comm.start.all_gather(np.array([comm.rank]))
    same(
        half.all_reduce(data(key, comm.rank, np.int64, (50,))),
        np.sum([data(key, rank, np.int64, (50,)) for rank in members], axis=0),
    )
    assert [int(found[0]) for found in asked.wait()] == list(range(comm.size))


def point_to_point(comm: Communicator, draw: random.Random, key: str) -> None:
    """Messages between drawn ranks under few tags, in flight at once, waited for in any order."""
    messages = [
        (draw.randrange(comm.size), draw.randrange(comm.size), draw.randrange(2), draw.choice(COUNTS))
        for _ in range(draw.randint(3, 14))
    ]
    own = random.Random(f"{key} {comm.rank}")
    ends: list[Callable[[], None]] = []

    def send_all() -> None:
        for number, (source, dest, tag, count) in enumerate(messages):
            if source == comm.rank:
                ends.append(comm.start.send(data(f"{key} {number}", 0, np.int32, (count,)), dest, tag=tag).wait)

    def receive_all() -> None:
        for number, (source, dest, tag, count) in enumerate(messages):
            if dest == comm.rank:
                request = comm.start.recv(source, tag=tag)
                expected = data(f"{key} {number}", 0, np.int32, (count,))
                ends.append(lambda request=request, expected=expected: same(request.wait(), expected))

    for step in (receive_all, send_all) if own.random() < 0.5 else (send_all, receive_all):
        step()
    own.shuffle(ends)
    for end in ends:
        end()


def buffers(comm: Communicator, draw: random.Random, key: str) -> None:
    count, after, before = draw.choice(COUNTS), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    array, place = data(key, comm.rank, np.float64, (count,)), np.empty(count + 1)
    if comm.rank % 2 == 0 and comm.rank != comm.size - 1:  # some send first, so that nobody waits in a circle
        comm.send_buffer(array, after)
        assert comm.recv_buffer(place, before) == array.nbytes
    else:
        assert comm.recv_buffer(place, before) == array.nbytes
        comm.send_buffer(array, after)
    same(place[:count], data(key, before, np.float64, (count,)))


def threads(comm: Communicator, draw: random.Random, key: str) -> None:
    """Threads that talk with the next rank, each under a tag of its own, or all under one."""
    num_threads, shared, count = draw.randint(2, 4), draw.random() < 0.5, draw.choice(COUNTS[1:])
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arrived = collections.Counter[tuple[int, int]]()
    errors: list[BaseException] = []

    def talk(thread: int) -> None:
        tag = 9 if shared else 10 + thread
        try:
            for turn in range(3):
                length = count + thread if turn else 2
                sending = comm.start.send(np.full(length + 1, 10 * thread + turn), after, tag=tag)
                found = comm.recv(before, tag=tag)
                assert np.all(found == found[0]), found
                arrived[int(found[0]), len(found)] += 1
                assert shared or found[0] == 10 * thread + turn, (found[0], thread, turn)
                sending.wait()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    talking = [threading.Thread(target=talk, args=(thread,), daemon=True) for thread in range(num_threads)]
    try:
        for thread in talking:
            thread.start()
        for thread in talking:
            thread.join()
    except BaseException as error:  # Ctrl-C: the others must end, too
        comm.abort(f"{type(error).__name__} while threads talked")
        raise
    for error in errors:
        raise error
    assert arrived == {
        (10 * thread + turn, (count + thread if turn else 2) + 1): 1
        for thread in range(num_threads)
        for turn in range(3)
    }


def overflowing(comm: Communicator, draw: random.Random, key: str, *, how: str = "ignore") -> None:
    """A sum that overflows, with an error that is none of braidax, or without one."""
    with np.errstate(over=how):  # type: ignore[call-overload]
        found = comm.all_reduce(np.full(draw.choice([100, 50_000]), np.finfo(np.float64).max))
    assert np.all(np.isinf(found))


Statement = Callable[[Communicator, random.Random, str], None]
STATEMENTS: dict[str, Statement] = {
    "collective": collective,
    "several collectives": several_collectives,
    "group": group,
    "point to point": point_to_point,
    "buffers": buffers,
    "threads": threads,
}
ALL: dict[str, Statement] = {**STATEMENTS, "overflowing": overflowing}


def injected(comm: Communicator, draw: random.Random, key: str) -> None:
    raise Injected(INJECTED)


def disagree(comm: Communicator, draw: random.Random, key: str) -> None:
    comm.all_reduce(np.ones(draw.choice([7, 70_000]), np.float16), np.hypot)


def argument(comm: Communicator, draw: random.Random, key: str) -> None:
    draw.choice([comm.all_gather, comm.start.all_gather])(np.array([{}]))


def caught(comm: Communicator, draw: random.Random, key: str) -> None:
    """Goes on after an error, as if nothing had happened."""
    with suppress(ArgumentError):
        comm.reduce_scatter(np.ones((comm.size + 1, 3)))


def abort(comm: Communicator, draw: random.Random, key: str) -> None:
    comm.abort(INJECTED)


def overflow(comm: Communicator, draw: random.Random, key: str) -> None:
    overflowing(comm, draw, key, how="raise")


def nothing(comm: Communicator, draw: random.Random, key: str) -> None: ...


FAULTS: dict[str, Statement] = {
    "raise": injected,
    "disagree": disagree,
    "argument": argument,
    "caught": caught,
    "abort": abort,
    "overflow": overflow,
}
WORDS = {  # of what the others are told
    "raise": f"Injected: {INJECTED}",
    "disagree": "all_reduce(hypot) of float16[",
    "argument": "all_gather failed: value= has dtype=object",
    "caught": "reduce_scatter failed: array= has shape",
    "abort": INJECTED,
    "overflow": "FloatingPointError",
    "interrupt": "KeyboardInterrupt",
}

OWN: dict[str, tuple[type[BaseException], ...]] = {  # what the victim itself raises, where it is not what the others do
    "raise": (Injected,),
    "argument": (ArgumentError, CommError),  # a request says so when it is waited for
    "overflow": (FloatingPointError,),
    "interrupt": (KeyboardInterrupt, CommError),  # which may come as a thread of the victim's is amid a call
}


def act(comm: Communicator, program: Program) -> None:
    """Runs the statements of a program on one rank."""
    for index, name in enumerate(program.statements):
        key = f"{program.transport} {program.seed} {index}"
        statement = ALL[name]
        if index == program.at and comm.rank == program.victim and program.fault in FAULTS:
            FAULTS[program.fault](comm, random.Random(key), key)
            statement = ALL[name] if program.fault != "overflow" else nothing
        statement(comm, random.Random(key), key)


class CtrlC:
    """Ctrl-C for the main thread, while it is open to it."""

    def __init__(self) -> None:
        self._is_open = False
        signal.signal(signal.SIGINT, self._on_signal)

    @contextmanager
    def after(self, seconds: float | None) -> Iterator[None]:
        """Is open inside, and comes after a while."""
        ended = threading.Event()

        def send() -> None:
            if seconds is not None and not ended.wait(seconds):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            self._is_open = True
            yield
        finally:
            self._is_open = False
            ended.set()
            sender.join()

    def _on_signal(self, number: int, frame: object) -> None:
        if self._is_open:
            self._is_open = False
            raise KeyboardInterrupt


def run(program: Program, ctrl_c: CtrlC) -> list[BaseException | None]:
    """Runs a program, the victim's rank on this thread. **Returns:** what each rank raised."""
    store, chosen = MemoryStore(), transports(program.transport, program.size)
    raised: list[BaseException | None] = [WaitTimeout("it never ended")] * program.size

    def rank_main(rank: int) -> None:
        try:
            tuning = Tuning(host=program.hosts[rank] if program.hosts else None)
            with connect(
                store,
                rank=rank,
                size=program.size,
                transport=chosen[rank],
                timeout_seconds=LIMIT_SECONDS,
                tuning=tuning,
            ) as comm:
                if rank == program.victim and program.fault == "interrupt":
                    with ctrl_c.after(program.delay_seconds):
                        act(comm, program)
                else:
                    act(comm, program)
                comm.barrier()
            raised[rank] = None
        except BaseException as error:  # noqa: BLE001
            raised[rank] = error

    others = [
        threading.Thread(target=rank_main, args=(rank,), daemon=True)
        for rank in range(program.size)
        if rank != program.victim
    ]
    for thread in others:
        thread.start()
    rank_main(program.victim)
    for thread in others:
        thread.join(2 * LIMIT_SECONDS)
    return raised


def complaint(program: Program, raised: list[BaseException | None], seconds: float) -> str:
    """Returns what is wrong with how a program ended, if anything is."""
    if seconds > LIMIT_SECONDS * 0.75:
        return f"took {seconds:.1f} s"
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("braidax-comm")]
    if left:
        return f"left {left}"
    own = raised[program.victim]
    if not program.fault or own is None:  # Ctrl-C comes too late, a rank that only lends its numbers cannot overflow
        if program.fault not in ("", "interrupt", "overflow"):
            return "the victim noticed nothing"
        return "" if not any(raised) else "a rank failed, and the victim did not"
    if not isinstance(own, OWN.get(program.fault, (CommError,))):
        return "the victim raised something else"
    for rank, error in enumerate(raised):
        if rank != program.victim:
            if not isinstance(error, BraidaxError) or isinstance(error, WaitTimeout):
                return f"rank {rank} did not raise an error of braidax in time"
            if WORDS[program.fault] not in str(error) or f"rank {program.victim} (host" not in str(error):
                return f"rank {rank} was not told what happened to rank {program.victim}"
    return ""


def main(transport: str, first: int, count: int) -> int:
    """Runs the programs, and says how many ended how."""
    faulthandler.dump_traceback_later(LIMIT_SECONDS * 3 + count * 2, exit=True)
    ctrl_c, ends, wrong = CtrlC(), collections.Counter[str](), 0
    for seed in range(first, first + count):
        program = drawn(seed, transport)
        began = time.monotonic()
        raised = run(program, ctrl_c)
        said = complaint(program, raised, time.monotonic() - began)
        ends["fine" if not any(raised) else f"error after {program.fault}"] += 1
        if said:
            wrong += 1
            sys.stdout.write(f"{said}: {program}: {raised}\n")
    sys.stdout.write(f"{transport}: {count} programs, {dict(sorted(ends.items()))}, {wrong} wrong\n")
    sys.stdout.flush()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
