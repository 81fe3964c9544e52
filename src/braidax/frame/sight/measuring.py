"""What a rank measures while it computes a plan: every second is of one operation and of one phase.

A rank that measures nothing has an `Unmeasured`, whose methods do nothing.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, final

from braidax.frame.plan.nodes import Node, topological
from braidax.frame.polars import pl

Phase = Literal["partition", "serialize", "wire", "wait", "local"]
PHASES: tuple[Phase, ...] = ("partition", "serialize", "wire", "wait", "local")
"""Where time goes: hashes, splitters and parts of rows, and all else that an operation does before and behind its
exchanges; rows into buffers and back; buffers on their way, from when all ranks have come; until all have come; Polars.
"""

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
    `seconds`: by phase.
    """

    num_rows: int | None = None
    num_bytes: int | None = None
    sent_rows: int = 0
    sent_bytes: int = 0
    num_exchanges: int = 0
    seconds: dict[Phase, float] = field(default_factory=dict)


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


UNMEASURED = Unmeasured()


@final
class Meter(Unmeasured):
    """Measures what this rank does, from now on. **Arguments:** `root`: of the plan, whose very nodes are computed."""

    def __init__(self, root: Node) -> None:
        self._nodes = topological(root)  # held here, since nodes are known by their identity
        self._numbers = {id(node): number for number, node in enumerate(self._nodes)}
        self._works: dict[int, Work] = {number: Work() for number in (-1, *self._numbers.values())}
        self._owners: dict[int, tuple[int, Node]] = {}
        self._within: dict[int, int] = {}
        self._alone: dict[int, tuple[str, ...]] = {}
        self._doing: list[tuple[int, Phase]] = [(-1, "partition")]
        self._operations = [-1]
        self._since = time.perf_counter()

    def measured(self) -> Measured:
        """Returns what was done so far."""
        self._count()
        works = tuple(self._works[number] for number in range(len(self._nodes)))
        return Measured(works, self._works[-1], self._within, self._alone)

    def operation(self, node: Node) -> AbstractContextManager[None]:
        number = self._numbers.get(id(node))
        return _NOTHING if number is None else self._operation(number)

    @contextmanager
    def _operation(self, number: int) -> Generator[None]:
        self._operations.append(number)
        try:
            with self._doing_now(number, "partition"):
                yield
        finally:
            self._operations.pop()

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        return self._doing_now(self._operations[-1], phase)

    @contextmanager
    def exchange(self, sent: Moved) -> Generator[None]:
        num_rows, num_bytes = sent.num_rows, sent.num_bytes
        with self.phase("wire"):
            yield
        work = self._works[self._operations[-1]]
        work.num_exchanges += 1
        work.sent_rows += sent.num_rows - num_rows
        work.sent_bytes += sent.num_bytes - num_bytes

    def local(self, node: Node, compute: "Callable[[], pl.DataFrame]") -> "pl.DataFrame":
        owner = self._owner(node)
        with self._doing_now(owner, "local"):
            frame = compute()
        if owner not in self._operations:  # else it is a step of an operation that is under way
            self._has(owner, frame)
            for one in self._pieces(node):
                if one != owner and one not in self._operations:
                    self._within[one] = owner
        return frame

    def whole(self, root: Node, compute: "Callable[[], pl.DataFrame]") -> "pl.DataFrame":
        for number, node in enumerate(self._nodes):
            self._owners[id(node)] = (number, node)
        return self.local(root, compute)

    def made(self, node: Node) -> None:
        self._owners[id(node)] = (self._operations[-1], node)

    def gave(self, node: Node, made: Node, frame: "pl.DataFrame | None") -> None:
        number = self._numbers.get(id(node))
        if number is None:
            return
        if made.kind != "Supplied":
            self._owners[id(made)] = (number, made)
        if frame is not None:
            self._has(number, frame)

    def alone(self, what: Callable[[], str]) -> None:
        number = self._operations[-1]
        self._alone[number] = (*self._alone.get(number, ()), what())

    def _has(self, number: int, frame: "pl.DataFrame") -> None:
        work = self._works[number]
        work.num_rows, work.num_bytes = frame.height, int(frame.estimated_size())

    def _owner(self, node: Node) -> int:
        found = self._owners.get(id(node))
        return self._operations[-1] if found is None else found[0]

    def _pieces(self, node: Node) -> Iterator[int]:
        for one in topological(node):
            if id(one) in self._owners:
                yield self._owners[id(one)][0]

    @contextmanager
    def _doing_now(self, number: int, phase: Phase) -> Generator[None]:
        self._count()
        self._doing.append((number, phase))
        try:
            yield
        finally:
            self._count()
            self._doing.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        number, phase = self._doing[-1]
        seconds: dict[Any, float] = self._works[number].seconds
        seconds[phase] = seconds.get(phase, 0.0) + now - self._since
        self._since = now
