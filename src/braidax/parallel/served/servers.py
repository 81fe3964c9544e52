"""The servers of tables, as those who train see them."""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError, CommError, PeerLost, WaitTimeout
from braidax.parallel.served.batches.agreeing import Agreement
from braidax.parallel.served.batches.batch_rows import BatchRows, Reads, Rows, dropped_rows
from braidax.spans import span

from .asking import Asking
from .compressed.feedback import Feedback
from .compressed.travelling import Travelling, unpacked_rows
from .layouts.resizing import Resizing
from .meetings.joining import Joined
from .meetings.same_model import check_same_model
from .meetings.world import trainer_lost
from .on_servers.dense import DenseForm
from .on_servers.told import described
from .programs import TableForm, TablePart, joined_sums
from .whole_tables import WholeTables
from .wire import Message, packed

_APART = (
    "asynchronous workers never wait for one another, and so at no moment servers have the same updates; let all call "
    "step.resize(…) with one server fewer, which makes copies anew, or give ParameterServers a staleness"
)


@final
class Servers:
    """The servers that the ranks of a gang are for one run: asked by any thread, until closed.

    All who train have one of these; where that says so, all call a method at the same time.

    **Arguments:** `joined`: their world. `forms`: of the tables, by name. `staleness`: how many updates one who trains
    may be ahead of another; None: each push is an update by itself. `copies`: how many servers have each part of a
    table. `spares`: how many servers have none at first. `disk`: the folder in which servers keep tables, and the bytes
    of memory for some rows of a part of them; None is memory. `travelling`: how rows do. `dense`: what each of so many
    servers has whole, where those who train have nothing; gradients are then averaged.

    **Fields:** `agreement`: of those who train. `whole`: tables as they are kept elsewhere.

    **Raises:** `ArgumentError`; what servers raise that have no room.
    """

    def __init__(
        self,
        joined: Joined,
        forms: Mapping[str, TableForm],
        *,
        staleness: int | None = 0,
        copies: int = 1,
        spares: int = 0,
        disk: tuple[str, int] | None = None,
        travelling: Travelling,
        dense: Callable[[int], Sequence[DenseForm]] = lambda _: (),
    ) -> None:
        self._forms, self._dense_of, self._joined = forms, dense, joined
        self._world, self._closed = joined.world, False
        self._num_workers, self.worker = joined.meeting.num_workers, joined.worker
        self._travelling = travelling
        is_apart = staleness is None and self._num_workers > 1
        self._asking = Asking(joined, copies, spares, _APART if is_apart else "")
        self.agreement = Agreement(self._asking, joined.meeting.num_workers, staleness)
        self._dense = dense(self.num_servers)
        self.whole = WholeTables(self._asking, forms)
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._asking.close)
        try:
            if copies > self.num_servers:
                raise ArgumentError(
                    f"copies={copies} of Served, and there are {self.num_servers} servers"
                    f"{f' and {spares} spare ones' if spares else ''}: expected as many at least"
                )
            self._feedback = Feedback(forms, travelling.wire, self._asking.num_ranks)
            self._world.divide()
            more = {"staleness": staleness, "disk": disk, **travelling._asdict()}
            tables, programs = described(forms)
            options = {**more, "copies": copies, "spares": spares}
            check_same_model(self._world.workers, tables, programs, self._dense, options)
            make = functools.partial(self._making, tables, programs, more)
            self._resizing = Resizing(self._asking, make, self._world, self.meet)
            self._stack.callback(self._resizing.close)
            self._first_asks(lambda part: make("make", part, self.num_servers))
            for rank in range(self._asking.num_ranks if self.worker == 0 and spares else 0):  # which resize needs
                self._asking.ask(rank, make("prepare", 0, self.num_servers))
        except BaseException:
            self.close(others="leave")
            raise

    def _making(
        self,
        tables: list[dict[str, Any]],
        programs: Mapping[str, Any],
        more: Mapping[str, Any],
        kind: str,
        part: int,
        parts: int,
    ) -> list[Any]:
        """Returns what a server is told that makes a part."""
        fields, arrays = {"tables": tables, "parts": parts, **more}, dict(programs)
        if self._dense:
            fields["dense"], of_dense = self._dense_of(parts)[part].told()
            fields["gradients"] = "averaged"
            arrays |= {f"dense/{name}": program for name, program in of_dense.items()}
        return self._asking.packed(kind, part, fields, arrays)

    def meet(self) -> None:
        """Returns when all processes have called it: what they have pushed before, all servers have.

        **Raises:** `PeerLost` when one of them is gone.
        """
        if self._world.workers is None:
            return
        try:
            with span("comm", "meet"):
                self._world.workers.barrier()
        except PeerLost as error:
            raise trainer_lost(str(error), error.rank, error.host) from error

    def recover(self, num_updates: int, settle: Callable[[], object]) -> None:
        """Lets others take the place of servers that are lost, where all who train have agreed to do that now.

        **Arguments:** `num_updates`: that this one has taken. `settle`: as of `Resizing.recover`.
        """
        wants = self._asking.may_recover and self.worker == 0 and bool(self._asking.wanted())
        if self.agreement.recovers(num_updates, wants="now" if wants else "no"):
            self._resizing.recover(settle)

    def resize(self, num_servers: int) -> None:
        """Lets so many servers have the tables; all processes call it, when servers have all that was pushed.

        **Raises:** as `ServedStep.resize`.
        """
        self._resizing.resize(num_servers)
        self._dense = self._dense_of(self.num_servers)

    def prepare_resize(self, num_servers: int) -> None:
        """Begins to copy what so many servers will have; all processes call it. **Raises:** as `resize`."""
        self._resizing.prepare(num_servers)

    @property
    def num_servers(self) -> int:
        """That have parts of the tables: row `id` is on number `id % num_servers` of them."""
        return self._asking.layout.num_parts

    def of_first(self, value: NDArray[Any]) -> NDArray[Any]:
        """Returns what the first of all has given; all call it."""
        return value if self._world.workers is None else np.asarray(self._world.workers.broadcast(value))

    def check_all_are_there(self, answers: Sequence[Message]) -> None:
        """Raises `PeerLost` where a server says that one who trains is gone, without whom no update is complete."""
        for answer in answers:
            if answer.kind == "lost":
                raise trainer_lost(f"worker {answer.fields['worker']} is gone", int(answer.fields["worker"]))

    def ask(self, kind: str, fields: Callable[[int], Mapping[str, Any]]) -> list[Message]:
        """Asks the servers of all parts at once. **Arguments:** `fields`: of the question for a part."""
        return self._asking.ask_all(lambda part: self._asking.packed(kind, part, fields(part)))

    def ask_every(
        self, kind: str, told: Callable[[int], tuple[Mapping[str, Any], Mapping[str, Any]]]
    ) -> list[list[Message]]:
        """Asks all who have parts at once. **Arguments:** `told`: fields and arrays. **Returns:** answers, by part."""
        return self._asking.ask_every(lambda part: self._asking.packed(kind, part, *told(part)))

    def tell(self, kind: str, fields: Mapping[str, Any], arrays: Callable[[int], Mapping[str, Any]]) -> None:
        """Tells all servers at once. **Arguments:** `kind`, `fields`: what. `arrays`: for those who have a part."""
        self.ask_every(kind, lambda part: (fields, arrays(part)))

    def first_tells(self, kind: str, fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Lets the first process tell all servers, while all others wait; all call it."""
        self._first_asks(lambda part: self._asking.packed(kind, part, fields, arrays))

    def _first_asks(self, question: Callable[[int], list[Any]]) -> None:
        """Lets the first process ask all servers, while all others wait."""
        if self.worker == 0:
            self._asking.ask_all(question, of="all")
        self.meet()

    # Rows

    def bear(self, key: jax.Array) -> None:
        """Makes the first rows of all tables; all processes call it. **Arguments:** `key`: that the step is given."""
        self.forget()
        self.meet()  # others may read what was there before
        data = np.asarray(jax.random.key_data(key))
        self._first_asks(lambda part: self._asking.packed("bear", part, {}, {"key": data}))

    def forget(self) -> None:
        """Begins anew with what gradients of this process lose on their way: other rows come."""
        self._feedback.forget()
        self.agreement.recovery = None

    def pull(
        self, batch: Mapping[str, BatchRows], *, known: Rows | None = None, at_least: int = 0, reads: Reads = "all"
    ) -> Rows:
        """Returns rows as they are now, and what servers have whole.

        **Arguments:** `known`: as they were, so that only changes are asked for. `at_least`: how many updates they have
        to have seen: it waits for these. `reads`: what. **Raises:** `PeerLost` when one who trains is gone, and they
        will not come.
        """
        fields = {"tables": [*batch], "since": -1 if known is None else known.step, "at_least": at_least}
        values = {
            name: known.values[name] if known is not None else self._empty(name, len(rows.unique))
            for name, rows in batch.items()
        }

        def question(server: int) -> list[Any]:
            ids = {name: rows.asked(server) for name, rows in batch.items()}
            return self._asking.packed("pull", server, {**fields, "reads": reads}, ids)

        answers = self._asking.ask_all(question)
        self.check_all_are_there(answers)
        whole: dict[str, NDArray[Any]] = {}
        for server, answer in enumerate(answers):
            self.agreement.hear(answer)
            if self._dense and reads != "rows":
                whole |= {name: answer.arrays[f"dense/{at}"] for at, name in enumerate(self._dense[server].names)}
            for name, rows in batch.items():
                changed = answer.arrays.get(f"{name}/changed")
                expected = self._empty(name, len(rows.asked(server) if changed is None else changed))
                told = f"rows of {name} that server {server} has sent"
                found = unpacked_rows(answer.arrays, name, self._travelling.to_reader(name, reads), expected, told)
                rows.put(values[name], server, found, changed)
        return Rows(min(int(answer.fields["step"]) for answer in answers), values, whole)

    def stage(
        self, batch: Mapping[str, BatchRows], gradients: Mapping[str, NDArray[Any]], step: int
    ) -> dict[str, list[Any]]:
        """Brings the gradients of an update to the servers, and returns the sums over those of all processes, by table.

        All processes call it. **Arguments:** as of `push`, which moves the rows.
        """
        self.ask_every("stage", self.of_gradients(batch, gradients, step))
        self.meet()
        answers = self._asking.ask_all(lambda part: self._asking.packed("sums", part, {"step": step}))
        self._feedback.keep(dropped_rows(batch, answers))
        parts = [answer.arrays for answer in answers]
        return {name: joined_sums(self._forms[name].joins, at, parts) for at, name in enumerate(batch)}

    def push(
        self,
        batch: Mapping[str, BatchRows],
        gradients: Mapping[str, NDArray[Any]] | None,
        numbers: Mapping[str, Sequence[Any]],
        step: int,
        whole: Mapping[str, Any] | None = None,
    ) -> int:
        """Moves rows by their gradients: of all tables, also those of which a server has no row in this batch.

        **Arguments:** `gradients`: `[u, D]`; None where they were staged. `numbers`: as of `Shard.push`. `step`: the
        number of updates before. `whole`: gradients of what servers have whole, by name, and "" for the loss.

        **Returns:** how many updates the servers have seen now.
        """
        told = {f"{at}/{one}": number for at, name in enumerate(batch) for one, number in enumerate(numbers[name])}
        more = {"num_numbers": [len(numbers[name]) for name in batch], "staged": gradients is None}
        of_gradients = None if gradients is None else self.of_gradients(batch, gradients, step, whole)

        def update(server: int) -> list[Any]:
            fields, arrays = ({"step": step}, {}) if of_gradients is None else of_gradients(server)
            return self._asking.packed("push", server, {**fields, **more}, {**arrays, **told})

        answers = self._asking.ask_all(update, of="all")
        self.taken()
        return min(int(answer.fields["step"]) for answer in answers)

    def of_gradients(
        self,
        batch: Mapping[str, BatchRows],
        gradients: Mapping[str, NDArray[Any]],
        step: int,
        whole: Mapping[str, Any] | None = None,
    ) -> Callable[[int], tuple[dict[str, Any], dict[str, Any]]]:
        """Returns what the server of a part is told of the gradients of an update: fields and arrays.

        It is called once for an update; `taken` is called behind it. **Arguments:** as of `push`.
        """
        sent = self._feedback.packed({name: rows.unique for name, rows in batch.items()}, gradients, step)

        def told(server: int) -> tuple[dict[str, Any], dict[str, Any]]:
            arrays: dict[str, Any] = {}
            for at, (name, rows) in enumerate(batch.items()):
                arrays[f"{at}/ids"] = rows.asked(server)
                arrays |= {f"{at}/{one}": rows.of_server(array, server) for one, array in sent[name].items()}
            if self._dense and whole is not None:
                own = self._dense[server]
                arrays |= {f"dense/{at}": whole[own.names[one]] for at, one in enumerate(own.moved)}
                arrays["loss"] = whole[""]
            return {"tables": [*batch], "step": step}, arrays

        return told

    def taken(self) -> None:
        """Notes that servers have all gradients of the last update: what these lost is added to the next ones."""
        self._feedback.keep({})

    # Tables as they are kept elsewhere

    def own_rows(self, name: str) -> tuple[int, int]:
        """Returns which rows of a table this process brings where all bring some: the first, and what is behind."""
        num_rows, num = self._forms[name].shape[0], self._joined.bringers
        first, last = (num_rows * min(one, num) // num for one in (self.worker, self.worker + 1))
        return first, last

    def check_alike(self, num_updates: int) -> None:
        """Returns when all processes have called it. **Raises:** `ArgumentError` where they have not taken as many
        updates."""
        self.meet()
        taken = (
            [num_updates]
            if self._world.workers is None
            else [int(one) for one in self._world.workers.all_gather(np.array(num_updates))]
        )
        if len({*taken}) > 1:
            raise ArgumentError(
                f"workers have taken {taken} updates: expected all to call this behind the same one, where an update "
                f"takes the gradients of all"
            )

    def all_counts(self, count: int) -> list[int]:
        """Returns what each process that brings rows has given; all of them call it."""
        if self._joined.bringers == 1 or self._world.workers is None:
            return [count]
        return [int(one) for one in self._world.workers.all_gather(np.array(count))]

    def brought(self) -> None:
        """Returns when all that bring rows have called it."""
        if self._joined.bringers > 1:
            self.meet()

    def write(self, name: str, part: TablePart, step: int) -> None:
        """Puts rows in place of what servers have. **Arguments:** `step`: how many updates they have seen."""
        self.forget()
        self.whole.write(name, part, step)

    def num_updates(self, *, at_least: int = 0) -> int:
        """Returns how many updates all servers have seen, when all copies of what they have have seen so many.

        **Raises:** as `pull`.
        """
        fields = {"tables": [], "since": -1, "at_least": at_least, "reads": "rows"}
        answers = [one for some in self.ask_every("pull", lambda _: (fields, {})) for one in some]
        self.check_all_are_there(answers)
        return min(int(answer.fields["step"]) for answer in answers)

    def read_whole(self) -> tuple[int, dict[str, NDArray[Any]]]:
        """Returns how many updates servers have seen, and what each has whole, with what is kept of it, by path."""
        found = dict[str, NDArray[Any]]()
        answers = self.ask("read dense", lambda _: {})
        for answer in answers:
            found |= {name: one.copy() for name, one in answer.arrays.items()}
        return min(int(answer.fields["step"]) for answer in answers), found

    def write_whole(self, carry: Mapping[str, Any], step: int) -> None:
        """Undoes `read_whole`."""

        def question(part: int) -> list[Any]:
            arrays = {str(at): carry[one.name] for at, one in enumerate(self._dense[part].carry)}
            return self._asking.packed("load dense", part, {"step": step}, arrays)

        self._asking.ask_all(question, of="all")

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Lets nobody else change anything, so that all that is read belongs to one moment of each server."""
        self._asking.ask_all(lambda part: self._asking.packed("hold", part, {}), of="all")
        try:
            yield
        finally:
            self._asking.ask_all(lambda part: self._asking.packed("release", part, {}), of="all")

    def _empty(self, name: str, count: int) -> NDArray[Any]:
        form = self._forms[name]
        return np.zeros((count, form.width), jax.numpy.dtype(form.dtype))

    def close(self, *, others: Literal["wait", "leave"] = "wait") -> None:
        """Ends the servers; what they have is gone. A second call does nothing.

        **Arguments:** `others`: whether processes that ask still are waited for, until they close theirs.
        """
        with contextlib.suppress(CommError, WaitTimeout):  # one that has failed asks no more
            if self._dense and not self._closed:  # others may train on
                for server in range(self._asking.num_ranks):
                    with contextlib.suppress(PeerLost):
                        self._world.ask(server, packed("leave"))
            elif others == "wait" and not self._closed:
                self.meet()
        self._closed = True
        self._stack.close()
