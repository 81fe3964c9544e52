"""The servers of tables, as those who train see them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, NamedTuple, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError, CommError, PeerLost, WaitTimeout
from braidax.gang import Gang
from braidax.program.coordination import coordination

from .batch_rows import BatchRows
from .meeting import begin_meeting, find_meeting
from .programs import JOINS, TableForm
from .server import described, key_data, serve
from .wire import Message, packed, unpacked

_BLOCK_BYTES = 16 << 20  # of a table that is read or written whole, a message


class Rows(NamedTuple):
    """Rows of a batch. **Fields:** `step`: how many updates they have seen. `values`: by table, `[u, D]`."""

    step: int
    values: dict[str, NDArray[Any]]


class TablePart(NamedTuple):
    """Consecutive rows of a table, as all servers have them.

    **Fields:** `first`: of them. `values`: `[m, D]`. `kept`: arrays `[m, …]` of what the optimizer keeps of them.
    `shared`: the numbers by which they are brought up.
    """

    first: int
    values: NDArray[Any]
    kept: list[NDArray[Any]]
    shared: list[NDArray[Any]]


@final
class Servers:
    """The servers that the ranks of a gang are for one run: asked by any thread, until closed.

    All processes of a run have one of these; where that says so, all call a method at the same time.

    **Arguments:** `gang`: which runs; its ranks do nothing else meanwhile. None in all processes but the first.
    `forms`: of the tables, by name. `staleness`: how many updates a process may be ahead of another.
    `transport`: of the messages. `timeout_seconds`: the limit of each wait.

    **Raises:** as `Gang.submit`, and as `comm.connect`.
    """

    def __init__(
        self,
        gang: Gang | None,
        forms: Mapping[str, TableForm],
        *,
        staleness: int = 0,
        transport: str = "tcp",
        timeout_seconds: float = 120.0,
    ) -> None:
        self._forms, self._num_workers, self._worker = forms, jax.process_count(), jax.process_index()
        service = coordination() if self._num_workers > 1 else None
        others = None if service is None else service.numbered("tables")
        if self._worker == 0:
            check_gang(gang)
            assert gang is not None, "it was checked"
            self.num_servers = gang.size
            if others is not None:
                others.set("servers", str(gang.size).encode())
            with begin_meeting(
                gang.hosts, transport=transport, timeout_seconds=timeout_seconds, others=others
            ) as meeting:
                self._serving = gang.submit(serve, meeting, self._num_workers)
                self._world = meeting.join(gang.size, gang.size + self._num_workers)
        else:
            assert others is not None, "there are several processes"
            meeting = find_meeting(others, timeout_seconds=timeout_seconds)
            self.num_servers = int(others.find("servers", timeout_seconds=timeout_seconds) or b"0")
            self._world = meeting.join(self.num_servers + self._worker, self.num_servers + self._num_workers)
        self._workers = self._world.split(1) if self._num_workers > 1 else None
        self._run, self._closed = meeting.job, False
        self._pool = ThreadPoolExecutor(max(1, self.num_servers - 1), thread_name_prefix="braidax-ask")
        fields, programs = described(forms)
        made = {"run": self._run, "tables": fields, "staleness": staleness}
        self._first_asks(lambda server: packed("make", made, programs))

    def meet(self) -> None:
        """Returns when all processes have called it: what they have pushed before, all servers have."""
        if self._workers is not None:
            self._workers.barrier()

    def _first_asks(self, question: Callable[[int], list[Any]]) -> None:
        """Lets the first process ask all servers, while all others wait."""
        if self._worker == 0:
            self._ask_all(question)
        self.meet()

    # Rows

    def bear(self, key: jax.Array) -> None:
        """Makes the first rows of all tables; all processes call it. **Arguments:** `key`: that the step is given."""
        data = key_data(key)
        self._first_asks(lambda server: self._packed("bear", {"step": 0}, {"key": data}))

    def pull(self, batch: Mapping[str, BatchRows], *, known: Rows | None = None) -> Rows:
        """Returns rows as they are now. **Arguments:** `known`: as they were, so that only changes are asked for."""
        names, since = [*batch], -1 if known is None else known.step
        values = {
            name: known.values[name] if known is not None else self._empty(name, len(rows.unique))
            for name, rows in batch.items()
        }

        def question(server: int) -> list[Any]:
            ids = {name: rows.asked(server) for name, rows in batch.items()}
            return self._packed("pull", {"tables": names, "since": since}, ids)

        answers = self._ask_all(question)
        for server, answer in enumerate(answers):
            for name, rows in batch.items():
                rows.put(values[name], server, answer.arrays[name], answer.arrays.get(f"{name}/changed"))
        return Rows(min(int(answer.fields["step"]) for answer in answers), values)

    def stage(
        self, batch: Mapping[str, BatchRows], gradients: Mapping[str, NDArray[Any]], step: int
    ) -> dict[str, list[Any]]:
        """Brings the gradients of an update to the servers, and returns the sums over those of all processes, by table.

        All processes call it. **Arguments:** as of `push`, which moves the rows.
        """
        self._ask_all(lambda server: self._packed("stage", *self._gradients(batch, gradients, step, server)))
        self.meet()
        answers = self._ask_all(lambda server: self._packed("sums", {"step": step}))
        found: dict[str, list[Any]] = {}
        for number, name in enumerate(batch):
            joins = [JOINS[join] for join in self._forms[name].joins]
            parts = [[answer.arrays[f"{number}/{at}"] for answer in answers] for at in range(len(joins))]
            found[name] = [functools.reduce(join, one) for join, one in zip(joins, parts, strict=True)]
        return found

    def push(
        self,
        batch: Mapping[str, BatchRows],
        gradients: Mapping[str, NDArray[Any]] | None,
        numbers: Mapping[str, Sequence[Any]],
        step: int,
    ) -> None:
        """Moves rows by their gradients: of all tables, also those of which a server has no row in this batch.

        **Arguments:** `gradients`: `[u, D]`; None where they were staged. `numbers`: as of `Shard.push`. `step`: the
        number of updates before.
        """
        told = {f"{at}/{one}": number for at, name in enumerate(batch) for one, number in enumerate(numbers[name])}
        more = {"num_numbers": [len(numbers[name]) for name in batch], "staged": gradients is None}

        def update(server: int) -> list[Any]:
            if gradients is None:
                return self._packed("push", {"step": step, **more}, told)
            fields, arrays = self._gradients(batch, gradients, step, server)
            return self._packed("push", {**fields, **more}, {**arrays, **told})

        self._ask_all(update)

    def _gradients(
        self, batch: Mapping[str, BatchRows], gradients: Mapping[str, NDArray[Any]], step: int, server: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what a server is told of gradients: fields and arrays."""
        arrays: dict[str, Any] = {}
        for at, (name, rows) in enumerate(batch.items()):
            arrays[f"{at}/ids"] = rows.asked(server)
            arrays[f"{at}/gradients"] = rows.of_server(gradients[name], server)
        return {"tables": [*batch], "step": step}, arrays

    # Tables as they are kept elsewhere

    def own_rows(self, name: str) -> tuple[int, int]:
        """Returns which rows of a table this process brings where all bring some: the first, and what is behind."""
        num_rows, num = self._forms[name].shape[0], self._num_workers
        return num_rows * self._worker // num, num_rows * (self._worker + 1) // num

    def read(self, name: str, first: int, last: int) -> TablePart:
        """Returns rows of a table, none of which lags behind. **Arguments:** `last`: the row behind the last."""
        form = self._forms[name]
        values = self._empty(name, last - first)
        kept = [np.empty((last - first, *one.shape), jax.numpy.dtype(one.dtype)) for one in form.kept]
        shared: list[NDArray[Any]] = []
        for start, stop in self._blocks(form, first, last):
            answers = self._ask_all(lambda server, rows=(start, stop): self._asked("read", name, server, *rows))
            for server, answer in enumerate(answers):
                part = self._part(server, start, stop, first)
                for at, leaf in enumerate((values, *kept)):
                    leaf[part] = answer.arrays["values" if at == 0 else f"kept/{at - 1}"]
            shared = [answers[0].arrays[f"shared/{at}"].copy() for at in range(form.num_shared)]
        return TablePart(first, values, kept, shared)

    def write(self, name: str, part: TablePart, step: int) -> None:
        """Puts rows in place of what servers have. **Arguments:** `step`: how many updates they have seen."""
        form, first = self._forms[name], part.first
        shared = {f"shared/{at}": number for at, number in enumerate(part.shared)}

        def block(server: int, start: int, stop: int) -> list[Any]:
            rows = self._part(server, start, stop, first)
            kept = {f"kept/{at}": leaf[rows] for at, leaf in enumerate(part.kept)}
            return self._asked("load", name, server, start, stop, {"values": part.values[rows], **kept, **shared}, step)

        for start, stop in self._blocks(form, first, first + len(part.values)):
            self._ask_all(lambda server, rows=(start, stop): block(server, *rows))

    def _blocks(self, form: TableForm, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yields the rows of a message after the other; one without rows where there are none."""
        rows = max(1, _BLOCK_BYTES // max(1, form.width * jax.numpy.dtype(form.dtype).itemsize))
        for start in range(first, max(last, first + 1), rows):
            yield start, min(start + rows, last)

    def _part(self, server: int, start: int, stop: int, first: int) -> slice:
        """Which of the rows from `first` on are a server's, of those from `start` to `stop`."""
        size = self.num_servers
        return slice(start + (server - start) % size - first, max(stop - first, 0), size)

    def _asked(
        self, kind: str, name: str, server: int, start: int, stop: int, arrays: Any = None, step: int = 0
    ) -> list[Any]:
        """Returns what a server is asked about its rows of some consecutive ones."""
        ends = [-(-(end - server) // self.num_servers) for end in (start, stop)]
        return self._packed(kind, {"table": name, "start": ends[0], "stop": ends[1], "step": step}, arrays)

    def _empty(self, name: str, count: int) -> NDArray[Any]:
        form = self._forms[name]
        return np.zeros((count, form.width), jax.numpy.dtype(form.dtype))

    # Messages

    def _packed(self, kind: str, fields: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> list[Any]:
        return packed(kind, {**fields, "run": self._run}, arrays)

    def _ask_all(self, question: Callable[[int], list[Any]]) -> list[Message]:
        """Asks all servers at once. **Raises:** what the first of them raises that fails, in their order."""

        def ask(server: int) -> Message:
            try:
                return unpacked(self._world.ask(server, question(server)))
            except PeerLost as error:
                raise PeerLost(
                    f"server {server} of {self.num_servers} is lost, and what it had of the tables: {error}; begin "
                    f"anew from the last checkpoint, with a gang that has all its ranks (gang.replace())",
                    server,
                    error.host,
                ) from error

        others = [self._pool.submit(ask, server) for server in range(1, self.num_servers)]
        first: list[Message] = [ask(0)]
        return first + [one.result() for one in others]

    def close(self, *, others: Literal["wait", "leave"] = "wait") -> None:
        """Ends the servers; what they have is gone. A second call does nothing.

        **Arguments:** `others`: whether processes that ask still are waited for, until they close theirs.
        """
        self._pool.shutdown()
        if others == "wait" and not self._closed:
            with contextlib.suppress(CommError, WaitTimeout):  # one that has failed asks no more
                self.meet()
        self._closed = True
        self._world.close()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(others="wait" if error is None else "leave")


def check_gang(gang: Any) -> None:
    """Raises `ArgumentError` for what is no gang that runs."""
    if not isinstance(gang, Gang):
        raise ArgumentError(
            f"servers is {gang!r}, expected a gang whose ranks will have the tables: "
            f"with bx.gang.LocalGang(2) as gang: bx.parallelize(…, servers=gang)"
        )
