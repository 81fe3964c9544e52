"""The servers of tables, as those who train see them."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, NamedTuple, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError, CommError, WaitTimeout
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


class WholeTable(NamedTuple):
    """A table as all servers have it. **Fields:** `values`: `[V, D]`. `kept`: arrays `[V, …]` of what rows have."""

    values: NDArray[Any]
    kept: list[NDArray[Any]]


@final
class Servers:
    """The servers that the ranks of a gang are for one run: asked by any thread, until closed.

    All processes of a run have one of these; where that says so, all call a method at the same time.

    **Arguments:** `gang`: which runs; its ranks do nothing else meanwhile. None in all processes but the first.
    `forms`: of the tables, by name. `transport`: of the messages. `timeout_seconds`: the limit of each wait.

    **Raises:** as `Gang.submit`, and as `comm.connect`.
    """

    def __init__(
        self,
        gang: Gang | None,
        forms: Mapping[str, TableForm],
        *,
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
        self._first_asks(lambda server: packed("make", {"run": self._run, "tables": fields}, programs))

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

    # Whole tables

    def read(self, name: str) -> WholeTable:
        """Returns a table, with no row that lags behind."""
        form = self._forms[name]
        num_rows, dtypes = form.shape[0], [jax.numpy.dtype(one.dtype) for one in form.kept]
        values = self._empty(name, num_rows)
        kept = [np.empty((num_rows, *one.shape), dtype) for one, dtype in zip(form.kept, dtypes, strict=True)]
        for start in range(0, -(-num_rows // self.num_servers), self._block(form)):
            stop = start + self._block(form)
            answers = self._ask_all(
                lambda server, start=start, stop=stop: self._packed(
                    "read", {"table": name, "start": start, "stop": stop}
                )
            )
            for server, answer in enumerate(answers):
                part = slice(server + start * self.num_servers, server + stop * self.num_servers, self.num_servers)
                for at, leaf in enumerate((values, *kept)):
                    leaf[part] = answer.arrays["values" if at == 0 else f"kept/{at - 1}"]
        return WholeTable(values, kept)

    def write(self, name: str, table: WholeTable, shared: Sequence[Any], step: int) -> None:
        """Puts a table in place of what servers have; all processes call it.

        **Arguments:** `shared`: the numbers that rows are brought up by. `step`: how many updates they have seen.
        """
        form, size = self._forms[name], self.num_servers
        numbers = {f"shared/{at}": number for at, number in enumerate(shared)}

        def block(server: int, start: int) -> list[Any]:
            part = slice(server + start * size, server + (start + self._block(form)) * size, size)
            arrays = {"values": table.values[part], **{f"kept/{at}": leaf[part] for at, leaf in enumerate(table.kept)}}
            return self._packed("load", {"table": name, "start": start, "step": step}, arrays | numbers)

        for start in range(0, max(1, form.shape[0] // size), self._block(form)):
            self._first_asks(lambda server, start=start: block(server, start))

    def _block(self, form: TableForm) -> int:
        return max(1, _BLOCK_BYTES // max(1, form.width * jax.numpy.dtype(form.dtype).itemsize))

    def _empty(self, name: str, count: int) -> NDArray[Any]:
        form = self._forms[name]
        return np.zeros((count, form.width), jax.numpy.dtype(form.dtype))

    # Messages

    def _packed(self, kind: str, fields: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> list[Any]:
        return packed(kind, {**fields, "run": self._run}, arrays)

    def _ask_all(self, question: Callable[[int], list[Any]]) -> list[Message]:
        """Asks all servers at once. **Raises:** what the first of them raises that fails, in their order."""

        def ask(server: int) -> Message:
            return unpacked(self._world.ask(server, question(server)))

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
