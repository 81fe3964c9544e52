"""The servers of tables, as those who train see them."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.comm import Communicator
from braidax.errors import ArgumentError, CommError, PeerLost, WaitTimeout
from braidax.gang import Gang
from braidax.program.coordination import coordination

from .batch_rows import BatchRows
from .meeting import begin_meeting, find_meeting
from .programs import JOINS, TableForm
from .server import described, serve
from .wire import Message, packed, unpacked

_log = logging.getLogger("braidax")
_NOTICED_SECONDS = 10.0
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

    **Arguments:** `gang`: which runs; its ranks do nothing else meanwhile, and its transport carries what these are
    asked. None in all processes but the first. `forms`: of the tables, by name. `staleness`: how many updates a process
    may be ahead of another. `copies`: how many servers have each part of a table. `disk`: the folder in which servers
    keep them; None is memory. `timeout_seconds`: the limit of each wait.

    **Raises:** as `Gang.submit`, and as `comm.connect`.
    """

    def __init__(
        self,
        gang: Gang | None,
        forms: Mapping[str, TableForm],
        *,
        staleness: int = 0,
        copies: int = 1,
        disk: str | None = None,
        timeout_seconds: float = 120.0,
    ) -> None:
        self._forms, self._num_workers, self._worker = forms, jax.process_count(), jax.process_index()
        service = coordination() if self._num_workers > 1 else None
        others = None if service is None else service.numbered("tables")
        if self._worker == 0:
            check_gang(gang)
            assert gang is not None, "it was checked"
            if copies > gang.size:
                raise ArgumentError(
                    f"copies={copies} of Served, and the gang has {gang.size} ranks: expected as many servers at least"
                )
            with begin_meeting(
                gang.hosts, transport=gang.transport, timeout_seconds=timeout_seconds, others=others
            ) as meeting:
                serving = gang.submit(serve, meeting, self._num_workers, copies)
                try:
                    self._world = meeting.join(gang.size, self._num_workers)
                except (CommError, WaitTimeout):
                    if serving.done:
                        serving.result()  # which says why they have not come
                    raise
        else:
            assert others is not None, "there are several processes"
            meeting = find_meeting(others, timeout_seconds=timeout_seconds)
            self._world = meeting.join(meeting.num_servers + self._worker, self._num_workers)
        self.num_servers = meeting.num_servers
        self._run, self._closed = meeting.job, False
        self._gang, self._copies, self._lost = gang, copies, set[int]()
        self._pool = ThreadPoolExecutor(self.num_servers * copies, thread_name_prefix="braidax-ask")
        self._workers: Communicator | None = None
        fields, programs = described(forms)
        made = {"tables": fields, "staleness": staleness, "disk": disk}
        try:
            self._workers = self._world.split(1) if self._num_workers > 1 else None
            self._first_asks(lambda part: self._packed("make", part, made, programs))
        except BaseException:
            self.close(others="leave")
            raise

    def meet(self) -> None:
        """Returns when all processes have called it: what they have pushed before, all servers have.

        **Raises:** `PeerLost` when one of them is gone.
        """
        if self._workers is None:
            return
        try:
            self._workers.barrier()
        except PeerLost as error:
            raise PeerLost(
                f"a process that trains, too, is lost, and an update takes all: {error}; start all of them again, and "
                f"they go on from the last checkpoint",
                error.rank,
                error.host,
            ) from error

    def _first_asks(self, question: Callable[[int], list[Any]]) -> None:
        """Lets the first process ask all servers, while all others wait."""
        if self._worker == 0:
            self._ask_all(question, of="all")
        self.meet()

    # Rows

    def bear(self, key: jax.Array) -> None:
        """Makes the first rows of all tables; all processes call it. **Arguments:** `key`: that the step is given."""
        data = np.asarray(jax.random.key_data(key))
        self._first_asks(lambda part: self._packed("bear", part, {}, {"key": data}))

    def pull(self, batch: Mapping[str, BatchRows], *, known: Rows | None = None) -> Rows:
        """Returns rows as they are now. **Arguments:** `known`: as they were, so that only changes are asked for."""
        names, since = [*batch], -1 if known is None else known.step
        values = {
            name: known.values[name] if known is not None else self._empty(name, len(rows.unique))
            for name, rows in batch.items()
        }

        def question(server: int) -> list[Any]:
            ids = {name: rows.asked(server) for name, rows in batch.items()}
            return self._packed("pull", server, {"tables": names, "since": since}, ids)

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
        self._ask_all(
            lambda part: self._packed("stage", part, *self._gradients(batch, gradients, step, part)), of="all"
        )
        self.meet()
        answers = self._ask_all(lambda part: self._packed("sums", part, {"step": step}))
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
                return self._packed("push", server, {"step": step, **more}, told)
            fields, arrays = self._gradients(batch, gradients, step, server)
            return self._packed("push", server, {**fields, **more}, {**arrays, **told})

        self._ask_all(update, of="all")

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
            self._ask_all(lambda server, rows=(start, stop): block(server, *rows), of="all")

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
        fields = {"table": name, "start": ends[0], "stop": ends[1], "step": step}
        return self._packed(kind, server, fields, arrays)

    def _empty(self, name: str, count: int) -> NDArray[Any]:
        form = self._forms[name]
        return np.zeros((count, form.width), jax.numpy.dtype(form.dtype))

    # Messages

    def ask(self, kind: str, fields: Callable[[int], Mapping[str, Any]]) -> list[Message]:
        """Asks the servers of all parts at once. **Arguments:** `fields`: of the question for a part."""
        return self._ask_all(lambda part: self._packed(kind, part, fields(part)))

    def _packed(
        self, kind: str, part: int, fields: Mapping[str, Any], arrays: Mapping[str, Any] | None = None
    ) -> list[Any]:
        return packed(kind, {**fields, "run": self._run, "part": part}, arrays)

    def _ask_all(self, question: Callable[[int], list[Any]], *, of: Literal["one", "all"] = "one") -> list[Message]:
        """Asks the servers of all parts at once.

        **Arguments:** `question`: for a part. `of`: whether one of those who have it is asked, or all.

        **Returns:** an answer for each part. **Raises:** `PeerLost` where all who have a part are gone; what the first
        of them raises that fails, in their order.
        """
        if of == "one":
            others = [self._pool.submit(self._ask_one, question, part) for part in range(1, self.num_servers)]
            return [self._ask_one(question, 0), *(one.result() for one in others)]
        asked = [
            [self._pool.submit(self._ask, server, part, question) for server in self._holders(part)]
            for part in range(self.num_servers)
        ]
        return [self._first(part, [one.result() for one in some]) for part, some in enumerate(asked)]

    def _ask_one(self, question: Callable[[int], list[Any]], part: int) -> Message:
        """Asks whoever of those that have a part is there."""
        answers: list[Message | PeerLost] = []
        for server in self._holders(part):
            answers.append(self._ask(server, part, question))
            if isinstance(answers[-1], Message):
                break
        return self._first(part, answers)

    def _holders(self, part: int) -> list[int]:
        """Returns the servers that have a part, and are not known to be lost."""
        every = [(part + copy) % self.num_servers for copy in range(self._copies)]
        return [server for server in every if server not in self._lost] or every

    def _ask(self, server: int, part: int, question: Callable[[int], list[Any]]) -> Message | PeerLost:
        """Returns the answer of a server, or that it is lost."""
        try:
            return unpacked(self._world.ask(server, question(part)))
        except PeerLost as error:
            if server not in self._lost and self._copies > 1:
                _log.warning(
                    "server %d of %d is lost (%s); training goes on with the copies of what it had",
                    server,
                    self.num_servers,
                    error,
                )
            self._lost.add(server)
            return error

    def _first(self, part: int, answers: Sequence[Message | PeerLost]) -> Message:
        """Returns the first answer for a part. **Raises:** `PeerLost` where there is none."""
        found = next((answer for answer in answers if isinstance(answer, Message)), None)
        if found is None:
            last = answers[-1]
            assert isinstance(last, PeerLost), "somebody was asked"
            copies = "its only copy" if self._copies == 1 else f"all {self._copies} copies"
            raise PeerLost(
                f"server {part} of {self.num_servers} is lost, and {copies} of what it had of the tables: {last}; "
                f"begin anew from the last checkpoint, with a gang that has all its ranks (gang.replace())",
                part,
                last.host,
            ) from last
        return found

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
        self._let_gang_notice()

    def _let_gang_notice(self) -> None:
        """Returns when the gang has seen all losses that messages told of first: `Gang.replace` brings back what it
        knows to be lost, and another run on the rest would wait for ranks that never come."""
        deadline = time.monotonic() + _NOTICED_SECONDS
        while self._gang is not None and not self._lost <= {*self._gang.lost} and time.monotonic() < deadline:
            time.sleep(0.01)


def check_gang(gang: Any) -> None:
    """Raises `ArgumentError` for what is no gang that runs."""
    if not isinstance(gang, Gang):
        raise ArgumentError(
            f"servers is {gang!r}, expected a gang whose ranks will have the tables: "
            f"with bx.gang.LocalGang(2) as gang: bx.parallelize(…, servers=gang)"
        )
