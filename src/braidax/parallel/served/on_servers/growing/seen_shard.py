"""A server's part of a table that grows: rows of ids that updates have read."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Literal, NamedTuple, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.errors import ArgumentError
from braidax.parallel.served.files.disk_rows import OnDisk
from braidax.parallel.served.on_servers.first_rows import AbsentRows
from braidax.parallel.served.on_servers.growing.entries import Entries
from braidax.parallel.served.on_servers.shard import Shard
from braidax.parallel.served.programs import TableForm
from braidax.parallel.served.row_memory import check_rows

Which = Literal["rows", "values", "counts", "ids", "changes"]
"""What is listed: rows as they lie, with what is kept of them, or as they are now; counts; which ids are there; and
numbers by which all rows were brought up to others, by how many were before them."""


class _Coming(NamedTuple):
    """What an update does. **Fields:** `ids`: its. `slots`: of them, -1 where they have no row. `is_new`: which get one
    now. `counted`: int32, how many updates have read those that have none."""

    ids: NDArray[Any]
    slots: NDArray[np.int64]
    is_new: NDArray[np.bool_]
    counted: NDArray[np.int32]


@final
class SeenShard:
    """Those rows `id` of a table with `id % size == rank` that updates have read; row `id` is the `id // size`th.

    It answers as a `Shard` does that has all rows, where any that is not there is one that no gradient has moved. Its
    rows are in the slots of a `Shard`, which grows, and where they are tells a map. Counts of ids that are not admitted
    yet are kept as rows are, exactly, and for as many ids.

    **Arguments:** `form`: of the table, which says what is `seen`. `rank`, `size`, `threads`, `disk`: as of `Shard`; a
    disk has room for all rows that there may be from the first on.

    **Fields:** `num_rows`: of all here, there or not. `key`: numbers of the key of `init`. `begun`: as of `Shard`.
    """

    def __init__(
        self, form: TableForm, rank: int, size: int, threads: Executor | None = None, disk: OnDisk | None = None
    ) -> None:
        assert form.seen is not None, "others have all rows"
        self.form, self.rank, self.size, self._seen, self._threads = form, rank, size, form.seen, threads
        self.num_rows, self.begun = len(range(rank, form.shape[0], size)), 0
        self._most = form.most_rows(rank, size)
        self.key: NDArray[Any] = np.zeros(0, np.uint32)
        self._absent = AbsentRows(form, rank, size)
        self._known: _Coming | None = None  # of the last update that was asked about
        self._grows = disk is None
        room = jax.ShapeDtypeStruct((1 if self._grows else self._most, *form.shape[1:]), form.spec.dtype)
        whose = f"{form.name}, as seen by server {rank} of {size}"
        self._rows = Shard(replace(form, name=whose, spec=room), 0, 1, threads, disk)
        self._first_shared = [np.array(one) for one in self._rows.shared]  # the first numbers that all share
        self._forget_all(0)

    def _forget_all(self, step: int) -> None:
        self._now, self._known = step, None
        self._rows.share(self._first_shared)
        self._absent.changes = []
        self._counts = np.zeros(0, np.int32)
        self._there = Entries(self._most, self._seen.expire_after, self._grow_rows)
        self._counted = Entries(self._most, self._seen.expire_after, self._grow_counts)
        self.begun += 1

    def _grow_rows(self, size: int) -> None:
        if self._grows:
            self._rows.make_room(size)

    def _grow_counts(self, size: int) -> None:
        counts = np.zeros(size, np.int32)
        counts[: len(self._counts)] = self._counts[:size]
        self._counts = counts

    def bear(self, key_data: NDArray[Any]) -> None:
        """Begins without any row. **Arguments:** `key_data`: of the key of `init`."""
        self.key = key_data.copy()
        self._forget_all(0)

    def close(self) -> None:
        """Lets go of all rows. A second call does nothing."""
        self._rows.close()

    @property
    def values(self) -> NDArray[Any]:
        """Of the rows that are there, and of room for others, `[n, D]`."""
        return self._rows.values

    @property
    def shared(self) -> Sequence[Any]:
        """As of `Shard`."""
        return self._rows.shared

    def share(self, shared: Sequence[Any]) -> None:
        """Sets what `shared` returns."""
        self._rows.share(shared)

    @property
    def rests(self) -> bool:
        """As of `Shard`."""
        return self._rows.rests

    def check(self, ids: NDArray[Any], name: str) -> None:
        """As of `Shard`."""
        check_rows(ids, name, self.num_rows, f"server {self.rank} serves {self.num_rows} of {self.form.name}")

    # Rows

    def pull(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Returns rows as they are now, `[m, D]`: those that are not there as they are without a gradient."""
        slots = self._there.live(ids, self._now)
        is_there = slots >= 0
        rows = np.empty((len(ids), self.form.width), self.values.dtype)
        rows[is_there] = self._rows.pull(slots[is_there])
        rows[~is_there] = self._absent.now(self.key, ids[~is_there], self.shared)
        return rows

    def moved_since(self, ids: NDArray[Any], since: int) -> NDArray[np.int64]:
        """Returns which of some rows may be others than before the step `since`: moved by a gradient, or given up."""
        slots = self._there.live(ids, self._now)
        if self._seen.expire_after is None:
            return np.flatnonzero((slots >= 0) & (self._there.touched[slots] >= since))
        return np.flatnonzero((slots < 0) | (self._there.touched[slots] >= since))

    def admitted(self, ids: NDArray[Any], gradients: NDArray[Any]) -> NDArray[Any]:
        """Returns the gradients of those rows that have room, or will get it. **Arguments:** `ids`, `gradients`: of the
        next update.

        **Raises:** `ArgumentError` where there is not room for all.
        """
        coming = self._coming(ids)
        return gradients[(coming.slots >= 0) | coming.is_new]

    def dropped(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Returns which gradients have no room. **Arguments:** `ids`: of the next update, or some of them."""
        coming = self._known if self._known is not None and self._known.ids is ids else self._found(ids)
        return np.flatnonzero((coming.slots < 0) & ~coming.is_new)

    def push(self, ids: NDArray[Any], gradients: NDArray[Any], numbers: Sequence[Any], step: int) -> None:
        """Moves rows by their gradients; new ones get room. **Arguments, Raises:** as of `Shard`, `admitted`."""
        coming = self._coming(ids)
        self._known = None
        numbers = self._changed(numbers)
        self._count(ids, coming, step)
        new, slots = ids[coming.is_new], coming.slots.copy()
        slots[coming.is_new] = self._there.add(new, step)
        self._rows.begin(slots[coming.is_new], self._absent.first(self.key, new))
        for before in self._absent.changes:
            self._rows.settle(slots[coming.is_new], before)
        moves = slots >= 0
        self._there.touched[slots[moves]] = step
        self._rows.push(slots[moves], gradients[moves], numbers, step)
        self._now = step + 1

    def _changed(self, numbers: Sequence[Any]) -> Sequence[Any]:
        """Brings rows up to a step in which somebody has set other numbers. **Arguments, Returns:** as `push` has them,
        and as they are behind that."""
        if self.rests or not numbers or not bool(numbers[-1]):
            return numbers
        before = [np.array(one) for one in numbers[: self.form.num_shared]]
        self._rows.settle(np.flatnonzero(self._there.are_there(self._now)), before)
        self._absent.changes.append(before)
        return [*numbers[:-1], np.zeros((), np.bool_)]

    def _coming(self, ids: NDArray[Any]) -> _Coming:
        """Returns what an update does, which `push` need not find out again. **Raises:** as `admitted`."""
        if self._known is None or self._known.ids is not ids:
            found = self._found(ids)
            self._check_room(found)
            self._known = found
        return self._known

    def _found(self, ids: NDArray[Any]) -> _Coming:
        slots = self._there.live(ids, self._now)
        if self._seen.admit_at == 1:
            return _Coming(ids, slots, slots < 0, np.zeros(len(ids), np.int32))
        at = self._counted.live(ids, self._now)
        counted = np.where(slots < 0, 1 + np.where(at >= 0, self._counts[at], 0), 0).astype(np.int32)
        is_new = counted >= self._seen.admit_at
        return _Coming(ids, slots, is_new, counted)

    def _check_room(self, coming: _Coming) -> None:
        num_new = int(coming.is_new.sum())
        self._check_fits(self._there, num_new, "rows of")
        if self._seen.admit_at > 1:
            again = int((coming.counted > 1).sum())  # these have a count already
            self._check_fits(self._counted, int((coming.counted > 0).sum()) - again - num_new, "counts of")

    def _check_fits(self, entries: Entries, num_new: int, what: str) -> None:
        if num_new > 0 and not entries.fits(num_new, self._now):
            raise ArgumentError(
                f"{self.form.name} grows as seen, with capacity={self._seen.capacity}, and server {self.rank} of "
                f"{self.size} has {what} {entries.num_live(self._now):,} ids, where {entries.most:,} have room; an "
                f"update has {num_new:,} more, and nothing of it was taken: expected fewer; give Seen a larger "
                f"capacity, which a checkpoint restores to as well, more servers, or let rows expire (expire_after)"
            )

    def _count(self, ids: NDArray[Any], coming: _Coming, step: int) -> None:
        if self._seen.admit_at == 1:
            return
        at = self._counted.live(ids, self._now)
        self._counted.forget(at[coming.is_new & (at >= 0)])
        counts = (coming.counted > 0) & ~coming.is_new
        at[counts & (at < 0)] = self._counted.add(ids[counts & (at < 0)], step)
        self._counts[at[counts]] = coming.counted[counts]
        self._counted.touched[at[counts]] = step

    def sums(self, gradients: NDArray[Any]) -> list[NDArray[Any]]:
        """As of `Shard`. **Arguments:** as of `admitted`."""
        return self._rows.sums(gradients)

    # Lists of what is there

    def listed(self, which: Which, start: int, stop: int, most: int, since: int = -1) -> dict[str, NDArray[Any]]:
        """Returns what is there, or is counted, by id: `ids` of the table, `touched`, and `values` and `kept/…`, or
        `counts`; with "ids" no more. **Arguments:** `start`, `stop`: ids of the table. `most`: how many at once.
        `since`: the step from which on they were touched."""
        if which == "changes":
            ids = np.arange(len(self._absent.changes))[max(0, start) : max(0, stop)][:most]
            return {"ids": ids, **{name: one[ids] for name, one in self._absent.stacked(self._first_shared).items()}}
        entries = self._entries(which)
        first, last = (-(-(end - self.rank) // self.size) for end in (start, stop))
        return self._of_slots(which, entries.listed(self._now, (first, last), most, since))

    def _entries(self, which: Which) -> Entries:
        return self._counted if which == "counts" else self._there

    def _of_slots(self, which: Which, slots: NDArray[Any]) -> dict[str, NDArray[Any]]:
        entries = self._entries(which)
        found = {"ids": entries.ids[slots] * self.size + self.rank, "touched": entries.touched[slots]}
        if which == "ids":
            return found
        if which == "counts":
            return {**found, "counts": self._counts[slots]}
        if which == "values":
            return {**found, "values": self._rows.pull(slots)}
        values, *kept, _ = self._rows.lying_at(slots)
        return {**found, "values": values, **{f"kept/{at}": leaf for at, leaf in enumerate(kept)}}

    def restart(self, key_data: NDArray[Any], shared: Sequence[Any], step: int) -> None:
        """Forgets all that is there, for `put_listed`. **Arguments:** `step`: how many updates were taken."""
        self.key = key_data.copy()
        self._forget_all(step)
        self._rows.share(shared)

    def put_listed(self, which: Which, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Undoes `listed`. **Raises:** `ArgumentError` for what is none of this server's, or has no room."""
        if which == "changes":
            self._put_changes(arrays)
            return
        entries, self._known = self._entries(which), None
        ids, touched = arrays["ids"], arrays["touched"]
        if ids.dtype != np.int64 or touched.dtype != np.int64 or ids.shape != touched.shape:
            raise ArgumentError(f"ids and touched of {self.form.name} are no numbers of the same ids")
        rows = ids // self.size
        self.check(rows, f"ids of {self.form.name}")
        if (ids % self.size != self.rank).any() or (np.diff(ids) <= 0).any() or (entries.live(rows, 0) >= 0).any():
            raise ArgumentError(f"ids of {self.form.name} are not those of server {self.rank}, each once and in order")
        self._check_fits(entries, len(ids), f"{which} of")
        slots = entries.add(rows, 0)
        entries.touched[slots] = touched
        if which == "counts":
            self._counts[slots] = arrays["counts"]
        else:
            self._rows.put_at(slots, [arrays["values"], *(arrays[f"kept/{at}"] for at in range(len(self._rows.kept)))])

    def _put_changes(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Puts changes behind those that are there. **Raises:** as `put_listed`."""
        numbers, first = [arrays[f"numbers/{at}"] for at in range(self.form.num_shared)], len(self._absent.changes)
        ids = np.arange(first, first + len(arrays["ids"]))
        expected = [((len(ids), *one.shape), one.dtype) for one in self._first_shared]
        told = [(one.shape, one.dtype) for one in numbers]
        if told != expected or not np.array_equal(arrays["ids"], ids):
            raise ArgumentError(
                f"changes {arrays['ids'].tolist()} of what moves {self.form.name} came as {told}, expected "
                f"{ids.tolist()} as {expected}"
            )
        self._absent.changes += [[one.copy() for one in some] for some in zip(*numbers, strict=True)]

    # What goes to other parts

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with all that is kept of it."""
        return self._rows.row_bytes

    def compile(self) -> Iterator[int]:
        """As of `Shard`."""
        return self._rows.compile()

    def held(self, which: Which, of: tuple[int, int]) -> tuple[int, int]:
        """Returns how many ids are here of a part, and the slot behind the last. **Arguments:** `of`: the part, and of
        how many."""
        return len(self._slots_of(which, of, slice(None))), len(self._entries(which).ids)

    def taken(self, which: Which, of: tuple[int, int], slots: slice) -> dict[str, NDArray[Any]]:
        """Returns as `listed` what is in some slots. **Arguments:** `of`: as of `held`."""
        return self._of_slots(which, self._slots_of(which, of, slots))

    def _slots_of(self, which: Which, of: tuple[int, int], slots: slice) -> NDArray[np.int64]:
        entries, first = self._entries(which), slots.indices(len(self._entries(which).ids))[0]
        ids = entries.ids[slots] * self.size + self.rank
        found = np.flatnonzero(entries.are_there(self._now, slots) & (ids % of[1] == of[0]))
        return first + found[np.argsort(ids[found])]

    def check_moves(self, which: Which, count: int) -> None:
        """Raises `ArgumentError` where this part, which has nothing yet, has no room for so many ids."""
        most = self._entries(which).most
        if count > most:
            raise ArgumentError(
                f"{self.form.name} grows as seen, with capacity={self._seen.capacity}, and {which} of {count:,} ids "
                f"would be in part {self.rank} of {self.size}, where {most:,} have room: expected fewer; restore a "
                f"checkpoint with a larger capacity of Seen, let rows expire (expire_after), or take another number of "
                f"servers"
            )

    def check_list(self, which: Which, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Raises `ArgumentError` for what is no list of another part."""
        expected = {name: (one.shape[1:], one.dtype) for name, one in self._of_slots(which, np.empty(0, int)).items()}
        told = {name: (one.shape[1:], one.dtype) for name, one in arrays.items()}
        if told != expected or len({len(one) for one in arrays.values()}) != 1:
            raise ArgumentError(
                f"{which} of {self.form.name} came as {told}, expected as many of each of {expected} of a server of "
                f"this version"
            )

    def state(self) -> dict[str, NDArray[Any]]:
        """Returns what parts have besides rows."""
        changes = self.listed("changes", 0, len(self._absent.changes), len(self._absent.changes))
        return {"key": self.key, **{f"changes/{name}": one for name, one in changes.items()}}

    def follow(self, state: Mapping[str, NDArray[Any]], step: int) -> None:
        """Goes on as a part whose ids were put here. **Arguments:** `state`: of it. `step`: updates were taken."""
        self.key, self._now, self._known = state["key"].copy(), step, None
        self._absent.changes = []
        self._put_changes({name.removeprefix("changes/"): one for name, one in state.items() if "changes/" in name})
