"""A server: the parts of tables that one rank of a gang has, and what it answers."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, final

import jax
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.compressed.travelling import Travelling, packed_rows, unpacked_rows
from braidax.parallel.served.on_servers.growing.answers import follow_state, growing_answers, state_of
from braidax.parallel.served.on_servers.growing.seen_shard import SeenShard
from braidax.parallel.served.wire import Message, packed, unpacked

from .copying import copied, copied_again
from .dense import DenseForm, DensePart, DensePrograms
from .gathered import Agreements, moved_whole, proposed, sums_of_all, sums_of_rows
from .reading import rows_changed, rows_lying, variables
from .shard import Shard
from .told import disks_of, forms_from
from .updates import AnyShard, Given, Update, Updates, Waiting

_ANEW = ("make", "bear", "load", "load dense", "restart", "put", "resume")  # what gives a server other tables


@final
class TableServer:
    """Answers requests about the parts of tables that this server has, one after the other.

    What it has belongs to one run at a time, which names itself in each request: another one is refused. An update is
    taken when all who train have pushed it, as one of the sum or the mean of their gradients, in their order; or each
    by itself, where they train asynchronously. A request that has to wait is answered later, and others meanwhile.

    **Arguments:** `rank`, `size`: which part of how many this is. `num_workers`: who train. `threads`: as of `Shard`.

    **Fields:** `number`, `size`: of the part, and of how many. `run`: whose tables these are. `shards`: by name.
    """

    def __init__(self, rank: int, size: int, num_workers: int = 1, threads: Executor | None = None) -> None:
        self.number, self.size, self._num_workers, self._threads = rank, size, num_workers, threads
        self.run = ""  # whose tables these are
        self.shards: dict[str, AnyShard] = {}
        self._dense: DensePart | None = None
        self._updates, self._agreements = Updates(f"server {rank}", num_workers, 0), Agreements()
        self._staleness: int | None = 0
        self._travelling = Travelling()
        self._averages = False  # or sums gradients, which are then of a mean already
        self._failed = ""
        self._gone: int | None = None  # who trains, without whom no update is complete any more
        self._waiting = Waiting()  # for updates
        self._holder: int | None = None  # who lets nothing be changed just now
        self._answers: dict[str, Callable[[int, Message], Any]] = {
            "make": self._make,
            "bear": self._bear,
            "load": self._load,
            "load dense": self._load_dense,
            "pull": self._pull,
            "stage": self._stage,
            "sums": self._sums,
            "gather": self._gather,
            "agree": lambda _, message: proposed(self._agreements, message.fields),
            "push": self._push,
            "read": self._read,
            "changed": self._changed,
            "read dense": self._read_dense,
            "copy": lambda _, message: copied(self.shard_of_all(message.fields["table"]), message.fields),
            "copy again": lambda _, message: copied_again(self.shard_of_all(message.fields["table"]), message.fields),
            "state": self._state,
            "hold": self._hold,
            "release": self._release,
        }
        self._answers |= growing_answers(self._shard, lambda: self._updates.step, self._fail, self._begin)

    def handle(self, rank: int, value: Any) -> Any:
        """Answers a request, maybe later. **Raises:** `CommError` for none, `ArgumentError` for what cannot be."""
        return self.answer(rank, unpacked(value))

    def answer(self, rank: int, message: Message) -> Any:
        """Answers a request that was read. **Raises:** `ArgumentError` for what cannot be."""
        if message.kind not in self._answers:
            raise ArgumentError(f"a server of tables was asked to {message.kind!r}, expected one of {[*self._answers]}")
        run = message.fields.get("run")
        if message.kind != "make" and run != self.run:
            raise ArgumentError(
                f"a request is of the run {run!r}, and server {self.number} has the tables of {self.run!r}: expected "
                f"one run at a time for a gang; give each its own"
            )
        if self._failed and message.kind not in _ANEW:
            raise ArgumentError(
                f"server {self.number} has tables that are half of one update and half of another, as {self._failed}: "
                f"restore them from a checkpoint"
            )
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return self._answers[message.kind](rank, message)

    # What is asked

    def _make(self, rank: int, message: Message) -> Any:
        """Makes room for the tables of a run, in place of what there was."""
        self._travelling = Travelling.from_told(message.fields.get("wire"), message.fields.get("read_as", {}))
        self.close()
        forms = [*forms_from(message.fields["tables"], message.arrays)]
        disks = disks_of(message.fields.get("disk"), forms, self.number, self.size)
        for form, disk in zip(forms, disks, strict=True):
            where = (form, self.number, self.size, self._threads)
            try:
                self.shards[form.name] = (Shard if form.seen is None else SeenShard)(*where, disk)
            except MemoryError as error:
                raise MemoryError(
                    f"server {self.number} of {self.size} has no memory for its part of {form.name}, "
                    f"{form.dtype}{list(form.shape)}: give more servers, or larger ones"
                ) from error
        dense = message.fields.get("dense")
        programs = {one: message.arrays[f"dense/{one}"] for one in DensePrograms._fields} if dense else {}
        self._dense = DensePart(DenseForm.from_told(dense, programs)) if dense else None
        self.run = str(message.fields["run"])
        self._staleness = message.fields.get("staleness", 0)
        self._averages = message.fields.get("gradients") == "averaged"
        self._updates = Updates(f"server {self.number}", self._num_workers, self._staleness)
        self._gone, self._holder = None, None
        self._begin(0)
        return packed("made")

    def _bear(self, rank: int, message: Message) -> Any:
        for shard in self.shards.values():
            shard.bear(message.arrays["key"])
        if self._dense is not None:
            self._dense.bear(message.arrays["key"])
        self._begin(0)
        return packed("borne")

    def _load(self, rank: int, message: Message) -> Any:
        """Puts rows in place of those that are there: consecutive ones here, with what is kept of them."""
        shard, start = self.shard_of_all(message.fields["table"]), int(message.fields["start"])
        arrays = message.arrays
        shard.put(start, arrays["values"], [arrays[f"kept/{at}"] for at in range(len(shard.form.kept))])
        shard.share([arrays[f"shared/{at}"] for at in range(shard.form.num_shared)])
        self._begin(int(message.fields["step"]))
        return packed("loaded")

    def _load_dense(self, rank: int, message: Message) -> Any:
        """Puts variables that this server has whole in place of those that are there, with what is kept of them."""
        dense = self._having_dense()
        dense.load([message.arrays[str(at)] for at in range(len(dense.carry))])
        self._begin(int(message.fields["step"]))
        return packed("loaded")

    def _begin(self, step: int) -> None:
        """Waits for the update behind so many others."""
        self._failed = ""
        self._updates.begin(step)
        self._agreements.forget()
        self._answer_waiting()

    def _pull(self, rank: int, message: Message) -> Any:
        """Reads rows, and variables that are here whole, when `at_least` so many updates were taken.

        With `since`, it reads rows that may have changed behind that step, and which of the asked they are.
        """
        wanted = int(message.fields.get("at_least", 0))
        if wanted > self._updates.step:
            return self._later(wanted, rank, message) if self._gone is None else self._lost(self._gone)
        found: dict[str, NDArray[Any]] = {}
        since, reads = int(message.fields["since"]), message.fields.get("reads", "all")
        for name in message.fields["tables"]:
            shard, ids = self._shard(name), message.arrays[name]
            shard.check(ids, f"ids of {name}")
            if since >= 0 and shard.rests:
                changed = shard.moved_since(ids, since)
                found[f"{name}/changed"], ids = changed, ids[changed]
            found |= packed_rows(shard.pull(ids), name, self._travelling.to_reader(name, reads))
        if self._dense is not None and reads != "rows":
            values = self._dense.values() if reads == "all" else self._dense.read()
            found |= {f"dense/{at}": value for at, value in enumerate(values)}
        due = {"end": self._agreements.end, "recovery": self._agreements.recovery}
        return packed("rows", {"step": self._updates.step, **due}, found)

    def _stage(self, rank: int, message: Message) -> Any:
        """Takes the gradients of an update, for a push that has the numbers."""
        self._update_of(rank, message).give(rank, self._gradients(message))
        return packed("staged")

    def _sums(self, rank: int, message: Message) -> Any:
        """Sums over the gradients that all have staged, of rows that have room. Where one has none it refuses all."""
        update = self._update_of(rank, message)
        if len(update.given) < self._num_workers:
            raise ArgumentError(
                f"sums of step {message.fields['step']} were asked of server {self.number}, where {len(update.given)} "
                f"of {self._num_workers} have staged their gradients: expected all of them first"
            )
        found = sums_of_rows(update.summed())
        for number, (shard, ids, _) in enumerate(update.given.get(rank, []) if self._travelling.wire else []):
            found |= {f"{number}/dropped": shard.dropped(ids)} if isinstance(shard, SeenShard) else {}
        return packed("sums", {}, found)

    def _gather(self, rank: int, message: Message) -> Any:
        """Takes the gradients of an update, and answers, when all have given theirs, with the sums over their mean.

        Of one that was taken already it tells by what. `members` asks for the mean of these alone.
        """
        step = int(message.fields["step"])
        if self._updates.is_early(step) and self._gone is None:
            return self._later(self._updates.step + 1, rank, message)
        if self._updates.is_taken(rank, step):
            return packed("taken", *self._agreements.of(step).told())
        update = self._update_of(rank, message)
        if rank not in update.given:
            update.give(rank, self._gradients(message), self._dense_gradients(message))
            self._answer_waiting()
        if not self._updates.is_given(update, step):
            lost = self._gone if self._gone not in update.given else None
            return self._later(0, rank, message) if lost is None else self._lost(lost)
        members = message.fields.get("members", sorted(update.given))
        return packed("sums", {"members": members}, sums_of_all(update.of_members(members), self._having_dense()))

    def _lost(self, rank: int) -> Any:
        return packed("lost", {"worker": rank - self.size})

    def _push(self, rank: int, message: Message) -> Any:
        """Takes an update of rows; one that was taken already is not taken again."""
        if self._holder is not None and rank != self._holder:
            return self._later(0, rank, message)
        step, fields, arrays = int(message.fields["step"]), message.fields, message.arrays
        if self._updates.is_early(step) and self._gone is None:
            return self._later(self._updates.step + 1, rank, message)
        if self._updates.is_taken(rank, step) or (self._gone is not None and not fields.get("members")):
            return packed("pushed", {"step": self._updates.step})
        update = self._update_of(rank, message)
        if rank not in update.told:
            if not fields["staged"]:
                update.give(rank, self._gradients(message), self._dense_gradients(message))
            elif rank not in update.given:
                raise ArgumentError(
                    f"gradients of step {step} were not staged on server {self.number}: expected them first"
                )
            update.members = fields.get("members")
            pairs = enumerate(fields["num_numbers"])
            update.told[rank] = [[arrays[f"{number}/{at}"].copy() for at in range(count)] for number, count in pairs]
        self._take_complete(rank, step)
        return packed("pushed", {"step": self._updates.step})

    def _take_complete(self, rank: int, step: int) -> None:
        """Takes all updates that are complete. **Arguments:** who has pushed what just now."""
        try:
            while (whole := self._updates.complete(rank, step)) is not None:
                self._take(whole)
                if self._staleness is not None:
                    self._agreements.keep(self._updates.step, whole)
                self._updates.took(rank, step)
        finally:
            self._answer_waiting()

    def _take(self, update: Update) -> None:
        """Moves rows by an update that is complete; when that fails midway the tables are not gone on with."""
        step = self._updates.step
        update = update if update.members is None else update.of_members(update.members)
        try:
            given = update.mean() if self._averages else update.summed()
            told = next(iter(update.told.values()))
            numbers = told if self._dense is None else moved_whole(self._dense, update, given)
            for (shard, ids, gradients), told in zip(given, numbers, strict=True):
                shard.push(ids, gradients, told, step)
        except BaseException as error:
            self._failed = f"update {step} failed midway: {error!r}"
            raise

    def _update_of(self, rank: int, message: Message) -> Update:
        """Returns the update that a message is part of, which is not taken yet."""
        return self._updates.of(rank, int(message.fields["step"]))

    # What waits

    def _later(self, step: int, rank: int, message: Message) -> "Future[Any]":
        return self._waiting.add(step, rank, message)

    def _answer_waiting(self) -> None:
        is_due = self._gone is not None or bool(self._failed)
        self._waiting.answer(self.answer, lambda step: is_due or step <= self._updates.step)

    def lose(self, rank: int) -> None:
        """Goes on without one who trained; where updates take all, who waits for them is told. **Arguments:** its rank.

        A second call does nothing.
        """
        if self._holder == rank:
            self._holder = None
        if self._staleness is not None and not (self._staleness and self._averages):
            self._gone = rank
        elif self._staleness is not None:
            self._updates.leave_out(rank)
            self._take_complete(rank, self._updates.step)
        self._answer_waiting()

    def _hold(self, rank: int, message: Message) -> Any:
        """Lets nobody else push until `release`, so that several reads see the same."""
        if self._holder not in (None, rank):
            raise ArgumentError(f"server {self.number} is held by rank {self._holder}: expected one at a time")
        self._holder = rank
        return packed("held", {"step": self._updates.step})

    def _release(self, rank: int, message: Message) -> Any:
        """Undoes `hold`."""
        if self._holder == rank:
            self._holder = None
            self._answer_waiting()
        return packed("released")

    def _dense_gradients(self, message: Message) -> list[NDArray[Any]]:
        """Returns gradients of variables that are here whole, checked, and the loss."""
        if self._dense is None:
            return []
        given = [message.arrays[f"dense/{at}"] for at in range(len(self._dense.form.moved))]
        return [*self._dense.gradients(given), message.arrays["loss"]]

    def _gradients(self, message: Message) -> Given:
        """Returns what of an update is gradients, checked: nothing is moved yet."""
        given: Given = []
        for number, name in enumerate(message.fields["tables"]):
            shard, ids = self._shard(name), message.arrays[f"{number}/ids"]
            shard.check(ids, f"ids of {name}")
            form = jax.ShapeDtypeStruct((len(ids), shard.form.width), shard.values.dtype)
            told = f"gradients of {name}"
            gradients = unpacked_rows(message.arrays, f"{number}/gradients", self._travelling.wire, form, told)
            given.append((shard, ids, gradients))
        return given

    def _read(self, rank: int, message: Message) -> Any:
        return rows_lying(self.shard_of_all(message.fields["table"]), self._updates.step, message.fields)

    def _changed(self, rank: int, message: Message) -> Any:
        return rows_changed(self.shard_of_all(message.fields["table"]), self._updates.step, message.fields)

    def _read_dense(self, rank: int, message: Message) -> Any:
        return variables(self._having_dense(), self._updates.step, message.fields)

    def _state(self, rank: int, message: Message) -> Any:
        """Tells what a copy of this part has besides rows."""
        pairs = {f"{name}/{at}": one for name, shard in self.shards.items() for at, one in state_of(shard).items()}
        begun = {name: shard.begun for name, shard in self.shards.items()}
        settled = {name: shard.settled for name, shard in self.shards.items() if isinstance(shard, Shard)}
        told = {"step": self._updates.step, "next": self._updates.told(), "begun": begun, "settled": settled}
        return packed("state", told, pairs)

    @property
    def wanted(self) -> list[str]:
        """What this part has whole, variables and what is kept of them, by path."""
        return [] if self._dense is None else [one.name for one in self._dense.form.carry]

    def take_whole(self, found: Mapping[str, NDArray[Any]]) -> None:
        """Puts what other servers had whole here. **Arguments:** `found`: all that is `wanted`."""
        if lacking := [name for name in self.wanted if name not in found]:
            raise ArgumentError(f"servers lack {lacking}, which part {self.number} of {self.size} is to have whole")
        if self.wanted:
            self._having_dense().load([found[name] for name in self.wanted])

    def follow(self, states: Sequence[Message]) -> None:
        """Goes on as others, which have the rows that were copied here, stand. **Arguments:** what they tell as
        `state`. **Raises:** `ArgumentError` where they have not seen the same updates. Asynchronous ones may differ by
        what somebody pushed last before it was lost: then the last of them counts."""
        steps = sorted({int(state.fields["step"]) for state in states})
        if len(steps) != 1 and self._staleness is not None:
            raise ArgumentError(
                f"part {self.number} of {self.size} was copied from servers that have seen {steps} updates: expected "
                f"all to have seen the same, between two updates"
            )
        for name, shard in self.shards.items():
            follow_state(shard, {at: states[0].arrays[f"{name}/{at}"] for at in state_of(shard)}, steps[-1])
            begun = {int(state.fields["begun"][name]) for state in states}
            shard.begun = max(begun) + (len(begun) > 1)  # which of them were put there behind others is not known
        self._begin(steps[-1])
        for state in states:
            self._updates.follow(state.fields["next"])

    def close(self) -> None:
        """Lets go of all tables."""
        for shard in self.shards.values():
            shard.close()
        self.shards, self.run = {}, ""

    def _having_dense(self) -> DensePart:
        if self._dense is None:
            raise ArgumentError(f"server {self.number} has no variable whole: expected tables by rows to be asked for")
        return self._dense

    def _shard(self, name: Any) -> AnyShard:
        if name not in self.shards:
            raise ArgumentError(f"table {name!r} is not on the servers: expected one of {[*self.shards]}")
        return self.shards[name]

    def shard_of_all(self, name: Any) -> Shard:
        """Returns a part of a table of which servers have all rows."""
        if isinstance(shard := self._shard(name), SeenShard):
            raise ArgumentError(
                f"{name} grows as seen, and no row has a place of its own: expected to be asked for what is there"
            )
        return shard

    def _fail(self, told: str) -> None:
        self._failed = told
