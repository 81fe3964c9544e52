"""What a rank measures while it computes a plan: every second is of one operation and of one phase.

A rank that measures nothing has an `Unmeasured`, whose methods do nothing.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

from braidax.frame.plan.nodes import Node, topological
from braidax.frame.plan.words import words
from braidax.frame.polars import pl

Phase = Literal["partition", "serialize", "wire", "wait", "spill", "local"]
PHASES: tuple[Phase, ...] = ("partition", "serialize", "wire", "wait", "spill", "local")
"""Where time goes: hashes, splitters and parts of rows, and all else that an operation does before and behind its
exchanges; rows into buffers and back; buffers on their way, from when all ranks have come; until all have come; rows to
disk and back; Polars.
"""

MOST_WORDS = 100
"""Bytes of the words for an operation, where it is told how far it is."""

_NONE = -1  # the number of what is done for no operation
_EARLY: set[Phase] = {"partition"}  # what an operation does before its inputs are there counts as this
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass
class Moved:
    """What a rank has sent. **Fields:** rows and bytes to other ranks, and how many exchanges."""

    num_rows: int = 0
    num_bytes: int = 0
    num_exchanges: int = 0


@dataclass
class Work:
    """What one rank did for one operation.

    **Fields:** `num_rows`, `num_bytes`: that it has of the result; None where it never had them, since the operation
    was computed at once with another one, or in it. `sent_rows`, `sent_bytes`: to other ranks. `num_exchanges`.
    `seconds`: by phase. `spilled_bytes`, `read_back_bytes`: to disk, and from there.
    """

    num_rows: int | None = None
    num_bytes: int | None = None
    sent_rows: int = 0
    sent_bytes: int = 0
    num_exchanges: int = 0
    seconds: dict[Phase, float] = field(default_factory=dict)
    spilled_bytes: int = 0
    read_back_bytes: int = 0


class State(NamedTuple):
    """How far a rank is with an operation.

    **Fields:** `operation`: its number. `words`: what it does, cut to `MOST_WORDS` bytes. `is_running`: whether
    something is done for it now. Others: as of `Work`.
    """

    operation: int
    words: str
    is_running: bool
    num_rows: int | None
    sent_bytes: int
    spilled_bytes: int


@dataclass(frozen=True)
class Measured:
    """What one rank did for a plan.

    **Fields:** `works`: of each operation, in the order of `topological`. `rest`: what was done for none of them: the
    plan was read, hashes were compared. `within`: operations that were computed at once with another one, and with
    which. `on_one_rank`: of each operation, what rank 0 computed for all.
    """

    works: tuple[Work, ...]
    rest: Work
    within: dict[int, int]
    on_one_rank: dict[int, tuple[str, ...]]


class Unmeasured:
    """Measures nothing."""

    def begins(self, root: Node) -> None:
        """Begins with a plan, whose very nodes are computed. **Arguments:** `root`: of it."""

    def operation(self, node: Node) -> AbstractContextManager[None]:
        """Counts what is done in the `with` block as done for a node of the plan."""
        del node
        return _NOTHING

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Counts the time of the `with` block as that of a phase."""
        del phase
        return _NOTHING

    def exchange(self, sent: Moved) -> AbstractContextManager[None]:
        """Counts the `with` block as an exchange. **Arguments:** `sent`: what this rank has sent, which grows."""
        del sent
        return _NOTHING

    def local(self, node: Node, compute: "Callable[[], pl.DataFrame]") -> "pl.DataFrame":
        """Returns what a piece of the plan gives. **Arguments:** `node`: its last one. `compute`: computes it."""
        del node
        return compute()

    def whole(self, root: Node, compute: "Callable[[], pl.DataFrame]") -> "pl.DataFrame":
        """Returns what the whole plan gives, where one rank computes it as one piece."""
        del root
        return compute()

    def made(self, node: Node) -> None:
        """Notes that a node was made for the operation under way."""

    def gave(self, node: Node, made: Node, frame: "pl.DataFrame | None") -> None:
        """Notes what a node of the plan gave: another node, and its rows, if these are there."""

    def alone(self, what: Callable[[], str]) -> None:
        """Notes that rank 0 computes something for all. **Arguments:** `what`: says what."""

    def owner(self, node: Node | None = None) -> int:
        """Returns the operation of a node, or else the one for which this thread does what it does."""
        del node
        return _NONE

    def batches(self, owner: int, rows: "Iterator[pl.DataFrame]") -> "Iterator[pl.DataFrame]":
        """Yields rows, and counts what that takes, in whatever thread, as done for an operation."""
        del owner
        return rows

    def piece(self, node: Node, rows: "Iterator[pl.DataFrame]") -> "Iterator[pl.DataFrame]":
        """Yields what a piece of the plan gives. **Arguments:** `node`: its last one."""
        del node
        return rows

    def result(self, node: Node, rows: "Iterator[pl.DataFrame]") -> "Iterator[pl.DataFrame]":
        """Yields what a node of the plan gives."""
        del node
        return rows

    def spill(self, owner: int, *, written: int = 0, read_back: int = 0) -> AbstractContextManager[None]:
        """Counts the `with` block as so many bytes that go to disk, or come from there."""
        del owner, written, read_back
        return _NOTHING


UNMEASURED = Unmeasured()


@dataclass(frozen=True, eq=False)
class _Doing:
    """What a thread does."""

    number: int
    phase: Phase
    thread: int


@final
class Meter(Unmeasured):
    """Measures what this rank does, from now on. One thread computes; those of Polars may, whenever it reads rows.

    Where several do something at once, the time counts as that of what was begun last.

    **Fields:** `root`: of the plan, when it has begun.
    """

    def __init__(self) -> None:
        self.root: Node | None = None
        self._nodes: list[Node] = []  # held here, since nodes are known by their identity
        self._numbers: dict[int, int] = {}
        self._known_words: dict[int, str] = {}
        self._works: dict[int, Work] = {_NONE: Work()}
        self._owners: dict[int, tuple[int, Node]] = {}  # of nodes that are computed with others
        self._gave: dict[int, tuple[int, Node]] = {}  # tables that came of an operation
        self._within: dict[int, int] = {}
        self._alone: dict[int, tuple[str, ...]] = {}
        self._lock = threading.Lock()
        self._doing = [_Doing(_NONE, "partition", threading.get_ident())]  # of all threads
        self._here = threading.local()
        self._sending: tuple[int, Moved, int] | None = None  # the exchange under way, and its bytes at the begin
        self._since = time.perf_counter()

    def begins(self, root: Node) -> None:
        with self._lock:
            self.root, self._nodes = root, topological(root)
            self._numbers = {id(node): number for number, node in enumerate(self._nodes)}
            self._works |= {number: Work() for number in range(len(self._nodes))}

    def measured(self) -> Measured:
        """Returns what was done so far."""
        with self._lock:
            self._count()
            works = tuple(self._works[number] for number in range(len(self._nodes)))
            return Measured(works, self._works[_NONE], self._within, self._alone)

    def states(self) -> list[State]:
        """Returns how far this rank is with all operations that have begun. Any thread may call this."""
        with self._lock:
            running = {doing.number for doing in {one.thread: one for one in self._doing}.values()}
            return [
                State(
                    number,
                    self._words(number),
                    number in running,
                    work.num_rows,
                    self._sent_bytes(number),
                    work.spilled_bytes,
                )
                for number, work in self._works.items()
                if number != _NONE and (number in running or work.num_rows is not None or set(work.seconds) - _EARLY)
            ]

    def _words(self, number: int) -> str:
        if number not in self._known_words:
            text = words(self._nodes[number]).encode()
            self._known_words[number] = text[:MOST_WORDS].decode(errors="ignore")
        return self._known_words[number]

    def operation(self, node: Node) -> AbstractContextManager[None]:
        number = self._numbers.get(id(node))
        return _NOTHING if number is None else self._operation(number, "partition")

    @contextmanager
    def _operation(self, number: int, phase: Phase) -> Generator[None]:
        operations = self._operations
        operations.append(number)
        try:
            with self._doing_now(number, phase):
                yield
        finally:
            operations.pop()

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        return self._doing_now(self.owner(), phase)

    @contextmanager
    def exchange(self, sent: Moved) -> Generator[None]:
        num_rows, num_bytes = sent.num_rows, sent.num_bytes
        number = self.owner()
        work = self._works[number]
        self._sending = (number, sent, num_bytes)
        with self.phase("wire"):
            yield
        with self._lock:
            self._sending = None
            work.num_exchanges += 1
            work.sent_rows += sent.num_rows - num_rows
            work.sent_bytes += sent.num_bytes - num_bytes

    def local(self, node: Node, compute: "Callable[[], pl.DataFrame]") -> "pl.DataFrame":
        owner = self.owner(node)
        with self._doing_now(owner, "local"):
            frame = compute()
        if owner not in self._operations:  # else it is a step of an operation that is under way
            self._has(owner, frame.height, int(frame.estimated_size()))
            self._are_within(node, owner)
        return frame

    def whole(self, root: Node, compute: "Callable[[], pl.DataFrame]") -> "pl.DataFrame":
        for number, node in enumerate(self._nodes):
            self._owners[id(node)] = (number, node)
        return self.local(root, compute)

    def made(self, node: Node) -> None:
        self._owners[id(node)] = (self.owner(), node)

    def gave(self, node: Node, made: Node, frame: "pl.DataFrame | None") -> None:
        number = self._numbers.get(id(node))
        if number is None:
            return
        (self._gave if made.kind == "Supplied" else self._owners)[id(made)] = (number, made)
        if frame is not None:
            self._has(number, frame.height, int(frame.estimated_size()))

    def alone(self, what: Callable[[], str]) -> None:
        number = self.owner()
        self._alone[number] = (*self._alone.get(number, ()), what())

    def owner(self, node: Node | None = None) -> int:
        found = self._owners.get(id(node)) or self._gave.get(id(node))
        return self._operations[-1] if found is None else found[0]

    def batches(self, owner: int, rows: "Iterator[pl.DataFrame]") -> "Iterator[pl.DataFrame]":
        while True:
            with self._operation(owner, "local"):
                batch = next(rows, None)
            if batch is None:
                return
            yield batch

    def piece(self, node: Node, rows: "Iterator[pl.DataFrame]") -> "Iterator[pl.DataFrame]":
        owner = self.owner(node)
        rows = self.batches(owner, rows)
        if owner in self._operations:  # it is a step of an operation that is under way
            return rows
        self._are_within(node, owner)
        return self._counted(owner, rows)

    def result(self, node: Node, rows: "Iterator[pl.DataFrame]") -> "Iterator[pl.DataFrame]":
        number = self._numbers.get(id(node))
        return rows if number is None else self._counted(number, rows)

    @contextmanager
    def spill(self, owner: int, *, written: int = 0, read_back: int = 0) -> Generator[None]:
        with self._doing_now(owner, "spill"):
            yield
        with self._lock:
            self._works[owner].spilled_bytes += written
            self._works[owner].read_back_bytes += read_back

    def _counted(self, number: int, rows: "Iterator[pl.DataFrame]") -> "Iterator[pl.DataFrame]":
        num_rows = num_bytes = 0
        self._has_at_least(number, 0, 0)
        for batch in rows:
            num_rows += batch.height
            num_bytes += int(batch.estimated_size())
            self._has_at_least(number, num_rows, num_bytes)
            yield batch

    def _has(self, number: int, num_rows: int, num_bytes: int) -> None:
        work = self._works[number]
        work.num_rows, work.num_bytes = num_rows, num_bytes

    def _has_at_least(self, number: int, num_rows: int, num_bytes: int) -> None:
        """Notes rows of a result of which some may have been read before, in part or as a whole."""
        with self._lock:
            work = self._works[number]
            self._has(number, max(work.num_rows or 0, num_rows), max(work.num_bytes or 0, num_bytes))

    @property
    def _operations(self) -> list[int]:
        """The operations under way in this thread, the last one for which it does what it does."""
        found: list[int] | None = getattr(self._here, "operations", None)
        if found is None:
            found = self._here.operations = [_NONE]
        return found

    def _are_within(self, node: Node, owner: int) -> None:
        """Notes that the operations of a piece are computed at once with another one."""
        for one in topological(node):
            number = self._owners[id(one)][0] if id(one) in self._owners else owner
            if number != owner and number not in self._operations:
                self._within[number] = owner

    @contextmanager
    def _doing_now(self, number: int, phase: Phase) -> Generator[None]:
        doing = _Doing(number, phase, threading.get_ident())
        with self._lock:
            self._count()
            self._doing.append(doing)
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._doing.remove(doing)

    def _count(self) -> None:
        now = time.perf_counter()
        doing = self._doing[-1]
        seconds: dict[Any, float] = self._works[doing.number].seconds
        seconds[doing.phase] = seconds.get(doing.phase, 0.0) + now - self._since
        self._since = now

    def _sent_bytes(self, number: int) -> int:
        """Returns the bytes that were sent for an operation, in the exchange under way, too."""
        sent_bytes = self._works[number].sent_bytes
        if self._sending is not None and self._sending[0] == number:
            sent_bytes += self._sending[1].num_bytes - self._sending[2]
        return sent_bytes
