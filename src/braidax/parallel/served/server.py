"""A server: the parts of tables that one rank of a gang has, and what it answers."""

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.comm import Communicator
from braidax.cores import usable_cores
from braidax.errors import ArgumentError, WaitTimeout

from .meeting import Meeting
from .programs import KeptForm, Programs, TableForm
from .shard import Shard
from .wire import Message, packed, unpacked

_Given = list[tuple[Shard, NDArray[Any], NDArray[Any]]]
_ANEW = ("make", "bear", "load")  # what gives a server other tables


@dataclass
class _Update:
    """An update that not all have pushed yet.

    **Fields:** `given`: gradients of each table, by who has given them. `told`: the numbers by which they move rows.
    """

    given: dict[int, _Given]
    told: dict[int, list[list[NDArray[Any]]]]
    total: _Given | None = None

    def joined(self) -> _Given:
        """Returns the gradients of all who have given some, in their order, each row once."""
        if self.total is None or len(self.given) == 1:
            tables = zip(*(self.given[rank] for rank in sorted(self.given)), strict=True)
            self.total = [_summed(parts) for parts in tables]
        return self.total


def _summed(parts: Sequence[tuple[Shard, NDArray[Any], NDArray[Any]]]) -> tuple[Shard, NDArray[Any], NDArray[Any]]:
    """Sums the gradients that several have of one table."""
    if len(parts) == 1:
        return parts[0]
    shard = parts[0][0]
    unique = np.unique(np.concatenate([ids for _, ids, _ in parts]))
    total = np.zeros((len(unique), shard.form.width), shard.values.dtype)
    for _, ids, gradients in parts:
        total[np.searchsorted(unique, ids)] += gradients
    return shard, unique, total


@final
class TableServer:
    """Answers requests about the parts of tables that this server has, one after the other.

    What it has belongs to one run at a time, which names itself in each request: another one is refused. An update is
    taken when all who train have pushed it, as one of the sum of their gradients, in their order.

    **Arguments:** `rank`, `size`: which server of how many this is. `num_workers`: who train. `threads`: as of `Shard`.
    """

    def __init__(self, rank: int, size: int, num_workers: int = 1, threads: Executor | None = None) -> None:
        self._rank, self._size, self._num_workers, self._threads = rank, size, num_workers, threads
        self._run, self._step = "", 0  # whose tables these are, and how many updates they have seen
        self._shards: dict[str, Shard] = {}
        self._coming: dict[int, _Update] = {}  # that not all have pushed yet, by their steps
        self._staleness = 0  # how many updates one who pushes may be ahead of another
        self._failed = ""
        self._answers = {
            "make": self._make,
            "bear": self._bear,
            "load": self._load,
            "pull": self._pull,
            "stage": self._stage,
            "sums": self._sums,
            "push": self._push,
            "read": self._read,
            "changed": self._changed,
        }

    def handle(self, rank: int, value: Any) -> Any:
        """Answers a request. **Raises:** `CommError` for what is none, `ArgumentError` for what cannot be."""
        return self.answer(rank, unpacked(value))

    def answer(self, rank: int, message: Message) -> Any:
        """Answers a request that was read. **Raises:** `ArgumentError` for what cannot be."""
        if message.kind not in self._answers:
            raise ArgumentError(f"a server of tables was asked to {message.kind!r}, expected one of {[*self._answers]}")
        run = message.fields.get("run")
        if message.kind != "make" and run != self._run:
            raise ArgumentError(
                f"a request is of the run {run!r}, and server {self._rank} has the tables of {self._run!r}: expected "
                f"one run at a time for a gang; give each its own"
            )
        if self._failed and message.kind not in _ANEW:
            raise ArgumentError(
                f"server {self._rank} has tables that are half of one update and half of another, as {self._failed}: "
                f"restore them from a checkpoint"
            )
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return self._answers[message.kind](rank, message)

    # What is asked

    def _make(self, rank: int, message: Message) -> Any:
        """Makes room for the tables of a run, in place of what there was."""
        self.close()
        disk = message.fields.get("disk")
        for number, fields in enumerate(message.fields["tables"]):
            programs = Programs(*(message.arrays[f"{number}/{one}"].tobytes() for one in Programs._fields))
            kept = tuple(KeptForm(name, tuple(shape), dtype) for name, shape, dtype in fields["kept"])
            given: dict[str, Any] = {**fields, "kept": kept, "programs": programs}
            given |= {one: tuple(fields[one]) for one in ("shape", "joins")}
            form = TableForm(**given)
            try:
                self._shards[form.name] = Shard(form, self._rank, self._size, self._threads, disk)
            except MemoryError as error:
                raise MemoryError(
                    f"server {self._rank} of {self._size} has no memory for its part of {form.name}, "
                    f"{form.dtype}{list(form.shape)}: give more servers, or larger ones"
                ) from error
        self._run = str(message.fields["run"])
        self._staleness = int(message.fields.get("staleness", 0))
        self._begin(0)
        return packed("made")

    def _bear(self, rank: int, message: Message) -> Any:
        for shard in self._shards.values():
            shard.bear(message.arrays["key"])
        self._begin(0)
        return packed("borne")

    def _load(self, rank: int, message: Message) -> Any:
        """Puts rows in place of those that are there: consecutive ones here, with what is kept of them."""
        shard, start = self._shard(message.fields["table"]), int(message.fields["start"])
        arrays = message.arrays
        shard.put(start, arrays["values"], [arrays[f"kept/{at}"] for at in range(len(shard.form.kept))])
        shard.share([arrays[f"shared/{at}"] for at in range(shard.form.num_shared)])
        self._begin(int(message.fields["step"]))
        return packed("loaded")

    def _begin(self, step: int) -> None:
        """Waits for the update behind so many others."""
        self._step, self._failed = step, ""
        self._coming.clear()

    def _pull(self, rank: int, message: Message) -> Any:
        """Reads rows; with `since`, those that may have changed behind that step, and which of the asked they are."""
        found: dict[str, NDArray[Any]] = {}
        since = int(message.fields["since"])
        for name in message.fields["tables"]:
            shard, ids = self._shard(name), message.arrays[name]
            shard.check(ids, f"ids of {name}")
            if since >= 0 and shard.rests:
                changed = np.flatnonzero(shard.touched[ids] >= since)
                found[f"{name}/changed"], ids = changed, ids[changed]
            found[name] = shard.pull(ids)
        return packed("rows", {"step": self._step}, found)

    def _stage(self, rank: int, message: Message) -> Any:
        """Takes the gradients of an update, for a push that has the numbers."""
        self._update_of(message).given[rank] = self._gradients(message)
        return packed("staged")

    def _sums(self, rank: int, message: Message) -> Any:
        """Sums over the gradients that all have staged."""
        update = self._update_of(message)
        if len(update.given) < self._num_workers:
            raise ArgumentError(
                f"sums of step {message.fields['step']} were asked of server {self._rank}, where {len(update.given)} "
                f"of {self._num_workers} have staged their gradients: expected all of them first"
            )
        pairs = [(at, shard.sums(gradients)) for at, (shard, _, gradients) in enumerate(update.joined())]
        return packed("sums", {}, {f"{number}/{at}": one for number, sums in pairs for at, one in enumerate(sums)})

    def _push(self, rank: int, message: Message) -> Any:
        """Takes an update of rows; one that was taken already is not taken again."""
        step, fields, arrays = int(message.fields["step"]), message.fields, message.arrays
        if self._step - 1 - self._staleness <= step < self._step:
            return packed("pushed", {"step": self._step})
        update = self._update_of(message)
        if rank not in update.told:
            if not fields["staged"]:
                update.given[rank] = self._gradients(message)
            elif rank not in update.given:
                raise ArgumentError(
                    f"gradients of step {step} were not staged on server {self._rank}: expected them first"
                )
            pairs = enumerate(fields["num_numbers"])
            update.told[rank] = [[arrays[f"{number}/{at}"].copy() for at in range(count)] for number, count in pairs]
        while (whole := self._coming.get(self._step)) is not None and len(whole.told) == self._num_workers:
            self._take(whole)
        return packed("pushed", {"step": self._step})

    def _take(self, update: "_Update") -> None:
        """Moves rows by an update that all have pushed; when that fails midway the tables are not gone on with."""
        try:
            numbers = next(iter(update.told.values()))
            for (shard, ids, gradients), told in zip(update.joined(), numbers, strict=True):
                shard.push(ids, gradients, told, self._step)
        except BaseException as error:
            self._failed = f"update {self._step} failed midway: {error!r}"
            raise
        del self._coming[self._step]
        self._step += 1

    def _update_of(self, message: Message) -> "_Update":
        """Returns the update that a message is part of, which is not taken yet."""
        step = int(message.fields["step"])
        if not self._step <= step <= self._step + self._staleness:
            raise ArgumentError(
                f"an update of step {step} was pushed, and the tables on server {self._rank} have seen {self._step} "
                f"updates: expected a state that is as old as they are; go on with the last one"
            )
        return self._coming.setdefault(step, _Update({}, {}))

    def _gradients(self, message: Message) -> _Given:
        """Returns what of an update is gradients, checked: nothing is moved yet."""
        given: _Given = []
        for number, name in enumerate(message.fields["tables"]):
            shard, ids = self._shard(name), message.arrays[f"{number}/ids"]
            gradients = message.arrays[f"{number}/gradients"]
            shard.check(ids, f"ids of {name}")
            if gradients.shape != (len(ids), shard.form.width) or gradients.dtype != shard.values.dtype:
                raise ArgumentError(
                    f"gradients of {name} are {gradients.dtype}{list(gradients.shape)}, expected "
                    f"{shard.values.dtype}{[len(ids), shard.form.width]}"
                )
            given.append((shard, ids, gradients))
        return given

    def _read(self, rank: int, message: Message) -> Any:
        """Reads consecutive rows here, as they are now, and what is kept of them."""
        shard, start, stop = (
            self._shard(message.fields["table"]),
            *(int(message.fields[at]) for at in ("start", "stop")),
        )
        part = slice(max(0, start), min(stop, shard.num_rows))
        shard.settle(part)
        kept = {f"kept/{at}": leaf[part] for at, leaf in enumerate(shard.kept)}
        shared = {f"shared/{at}": number for at, number in enumerate(shard.shared)}
        return packed("rows", {"step": self._step}, {"values": shard.values[part], **kept, **shared})

    def _changed(self, rank: int, message: Message) -> Any:
        """Reads rows that may have changed since a step, as they are now, and says which of those here they are."""
        shard, fields = self._shard(message.fields["table"]), message.fields
        ids, looked = shard.changed(*(int(fields[one]) for one in ("since", "start", "most")))
        told = {"step": self._step, "begun": shard.begun, "looked": looked}
        return packed("rows", told, {"ids": ids, "values": shard.pull(ids)})

    def close(self) -> None:
        """Lets go of all tables."""
        for shard in self._shards.values():
            shard.close()
        self._shards, self._run = {}, ""

    def _shard(self, name: Any) -> Shard:
        if name not in self._shards:
            raise ArgumentError(f"table {name!r} is not on the servers: expected one of {[*self._shards]}")
        return self._shards[name]


@final
class Holder:
    """What one rank of a gang has: the part of each table that is its own, and copies of the parts before it.

    Copies are told of each update as the part itself is, so that either is as good as the other.

    **Arguments:** `rank`, `size`: of this. `num_workers`: who train. `copies`: how many ranks have each part.
    `threads`: as of `Shard`.
    """

    def __init__(self, rank: int, size: int, num_workers: int, copies: int, threads: Executor | None = None) -> None:
        self._rank = rank
        parts = [part % size for part in range(rank - copies + 1, rank + 1)]
        self._parts = {part: TableServer(part, size, num_workers, threads) for part in parts}

    def handle(self, rank: int, value: Any) -> Any:
        """Answers a request for a part. **Raises:** as `TableServer.handle`."""
        message = unpacked(value)
        part = message.fields.get("part")
        if part not in self._parts:
            raise ArgumentError(f"server {self._rank} was asked for part {part}, expected one of {[*self._parts]}")
        return self._parts[part].answer(rank, message)

    def close(self) -> None:
        """Lets go of all tables."""
        for part in self._parts.values():
            part.close()


def described(forms: Mapping[str, TableForm]) -> tuple[list[dict[str, Any]], dict[str, NDArray[np.uint8]]]:
    """Returns forms as a request to make them has them: fields, and programs by number."""
    fields: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[np.uint8]] = {}
    for number, form in enumerate(forms.values()):
        kept = [[one.name, list(one.shape), one.dtype] for one in form.kept]
        plain = {one: getattr(form, one) for one in ("name", "dtype", "num_shared")}
        fields.append({**plain, "shape": list(form.shape), "joins": list(form.joins), "kept": kept})
        for name, program in form.programs._asdict().items():
            arrays[f"{number}/{name}"] = np.frombuffer(program, np.uint8)
    return fields, arrays


def serve(comm: Communicator, meeting: Meeting, num_workers: int, copies: int) -> None:
    """Serves tables as one rank of a gang, until those who ask are gone.

    **Arguments:** `comm`: of the gang. `meeting`: where servers and those who ask meet. `num_workers`: of these.
    `copies`: how many servers have each part.
    """
    world = meeting.join(comm.rank, num_workers)
    with world, ThreadPoolExecutor(usable_cores(), "braidax-rows") as threads:
        server = Holder(comm.rank, comm.size, num_workers, copies, threads)
        if num_workers > 1:
            world.split(0)
        with contextlib.closing(server), world.serve(server.handle) as serving:
            for other in range(comm.size):  # servers ask one another nothing
                if other != comm.rank:
                    world.end_asking(other)
            while True:
                with contextlib.suppress(WaitTimeout):  # nobody has asked for a while
                    serving.wait()
                    return
