"""`ServedStep`: a step some of whose tables are on servers."""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, final

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.cores import usable_cores
from braidax.errors import ArgumentError
from braidax.gang import Gang
from braidax.parallel.compiler_options import CompilerOptions
from braidax.parallel.compute.in_flight import InFlight
from braidax.parallel.compute.work import Work
from braidax.parallel.given.arrays import adopt, canonical, place, typed_key, with_shardings
from braidax.parallel.run_ahead import check_coming
from braidax.parallel.served.batches.batch_rows import BatchRows
from braidax.parallel.served.batches.pulling import Pulling, fed_with
from braidax.parallel.served.batches.pushing import Pushing, Summing
from braidax.parallel.state import State
from braidax.program import Program, difference, specs_of

from .compiled import ServedPrograms, with_squares
from .compressed.travelling import Travelling
from .dense_state import dense_of, write_dense
from .feed import ServedFeed
from .files.publishing import Publisher
from .meetings.joining import join_with_processes
from .saved import ServedTables
from .seen_rows import check_has_all_rows, list_rows
from .servers import Servers


@final
class ServedStep:
    """A training step whose tables are in the host memory of servers; `parallelize` makes it, to be closed.

    An update pulls the rows that its batch reads, computes gradients and moves what is dense as `Step` does, and pushes
    the gradients of rows behind that, while the caller goes on. The next one waits for what this one has pushed, so
    that training is what it is on one device. A state has nothing of the tables: it belongs to what the servers have,
    and only the last one can be gone on with.

    **Arguments:** `work`, whose feed is `feed`. `born`: traced `key -> Born`. `batch`: specs. `gang`: whose ranks are
    the servers; None in all processes but the first, and for those of `braidax launch`.
    """

    def __init__(
        self,
        work: Work,
        feed: ServedFeed,
        born: Program,
        batch: Any,
        gang: Gang | None,
        *,
        batch_shardings: Any,
        compiler_options: CompilerOptions,
    ) -> None:
        self.mesh, self.plan, self.batch_shardings = work.mesh, work.plan, batch_shardings
        self._form, self._feed, self._batch_specs = work.form, feed, batch
        self._programs = programs = ServedPrograms(work, feed, batch_shardings, compiler_options)
        self._reading, self._state_specs = programs.reading, work.form.initial.out_specs
        self.state_shardings, self._whole = work.form.shardings, programs.whole
        self._in_flight = InFlight(self.mesh)
        self._in_flight.calls_host = work.calls_host
        self._lags: Counter[int] = Counter()
        self._last: weakref.ref[jax.Array] | None = None  # the step of the state that belongs to what servers have
        self._num_updates, self._key = -1, None  # before there are any tables
        self._forms = feed.forms(born)
        placement = feed.placement
        joined = join_with_processes(gang, copies=placement.copies)
        self._servers = Servers(
            joined,
            self._forms,
            staleness=placement.staleness,
            copies=placement.copies,
            spares=placement.spares,
            disk=placement.on_disk,
            travelling=Travelling(placement.wire, self._reading.read_as),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="braidax-served")
        self._threads = ThreadPoolExecutor(usable_cores(), thread_name_prefix="braidax-summing")
        self._summing, self._pushing = Summing(self._threads, joined.world), Pushing(self._servers, self._thread)
        self._pulling = Pulling(self._servers, feed, self._thread, self._reading if placement.staleness else None)
        self._tables = ServedTables(self._servers, self._forms, self._settled, self._restored)
        self._publisher = Publisher(self._servers, self._forms)

    # A state

    def init(self, key: jax.Array) -> State:
        """Makes the first state, and the tables on the servers. **Arguments, Raises:** as `Step.init`."""
        key = typed_key(key)
        if difference(self._state_specs.key, key, "key"):
            raise ArgumentError(f"key is {key!r}, expected one {self._state_specs.key.dtype}: jax.random.key(seed)")
        self._pushing.wait()
        self._pulling.forget()
        self._lags.clear()
        self._servers.bear(key)
        return self._own(self._programs.init(place(key, self._whole)), 0)

    @property
    def state_specs(self) -> State:
        """Of every leaf of a state shape, dtype and sharding; servers have the tables, and what is kept of them."""
        return with_shardings(self._state_specs, self.state_shardings)

    def _own(self, state: State, num_updates: int) -> State:
        self._last, self._num_updates, self._key = weakref.ref(state.step), num_updates, state.key
        return state

    def _check_state(self, state: Any) -> None:
        if message := difference(self._state_specs, state, "state"):
            raise ArgumentError(f"{message}: pass a state that came from this step's init or update")
        if self._last is None and self._num_updates >= 0 and int(state.step) == self._num_updates:
            self._last, self._key = weakref.ref(state.step), state.key  # restored with the tables
        if self._last is None or self._last() is not state.step:
            raise ArgumentError(
                f"state is not the last one that this step has returned, and the tables on its servers have seen "
                f"{max(0, self._num_updates)} updates: go on with that one, begin by init, restore it together with "
                f"step.tables, or load a state by from_dense"
            )

    # Updates

    def prepare(self, batch: Any) -> None:
        """Begins to pull the rows that a coming batch reads, while others are trained. Returns at once.

        Rows that updates move in the meantime are pulled once more, so that nothing changes but the time. Several
        batches may be prepared, in the order in which they come; each serves the update that gets the very arrays.
        Where ids depend on what the loss changes (`variables`), nothing is done.

        **Arguments:** `batch`: as of `update`, of device arrays.

        **Raises:** `ArgumentError` for batches of another form, or host arrays.
        """
        self._prepare(batch, self._num_updates + self._pulling.num_coming)

    def _prepare(self, batch: Any, step: int) -> None:
        """Begins to pull what a batch reads. **Arguments:** `step`: the update that it will be for."""
        self._check_batch(batch)
        check_coming(batch, "batch")
        if self._reading.knows_ahead and self._last is not None:
            variables = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), self._state_specs.variables)
            on = (self.state_shardings.variables, self._whole, self._whole)
            given = place((variables, self._key, np.int32(step)), on)
            ids = self._programs.ids(*given, place(batch, self.batch_shardings))
            self._pulling.begin(jax.tree.leaves(batch), ids, step if self._reading.draws_ids else None)

    def update(
        self, state: State, batch: Any, *, coming: Any = None, before_apply: Callable[[], object] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Takes one training step; it waits until servers have what the update before has pushed.

        **Arguments:** `state`: the last one; it is given up. `batch`, `before_apply`: as of `Step.update`. `coming`:
        the next batch, if it is known, for `prepare`.

        **Returns:** the new state and the metrics, as of `Step.update`.

        **Raises:** `ArgumentError` when state or batch are not like the ones the step was made for, or servers refuse.
        `DataError` when the batch has ids out of range, with `Hybrid(out_of_range="raise")`. `PeerLost` when a server
        is gone: what it had is lost.
        """
        self._check_state(state)
        self._check_batch(batch)
        placement = self._feed.placement
        self._servers.recover(self._num_updates, self._quiet)
        pulling = self._pulling.take(jax.tree.leaves(batch), self._num_updates)
        if coming is not None:
            self._prepare(coming, self._num_updates + 1 + self._pulling.num_coming)
        state, batch = adopt(state, self.state_shardings), place(batch, self.batch_shardings)
        at_least = max(0, self._num_updates - placement.staleness)  # which servers wait for: others push them, too
        if pulling is None:
            ids = self._programs.ids(state.variables, state.key, state.step, batch)
            self._pushing.wait_for_own(behind=placement.staleness)
            (rows, pulled), fed = self._pulling.pull(ids, at_least=at_least, reads="training"), None
        else:
            rows, pulled, fed = self._pulling.coming(pulling)
            self._pushing.wait_for_own(behind=placement.staleness)
            if pulled.step < at_least:
                fed = None
                pulled = self._servers.pull(rows, known=pulled, at_least=at_least, reads="training")
        self._lags[max(0, self._num_updates - pulled.step)] += 1
        fed = fed_with(self._reading, rows, pulled) if fed is None else fed
        self._in_flight.make_room()
        (dense, payload), variables, metrics = self._programs.gradients(
            state.params, fed, state.variables, state.key, state.step, batch
        )
        self._in_flight.add(metrics["loss"])
        if before_apply is not None:
            before_apply()
        totals: dict[int, Any] = {}
        if self._feed.stages:
            self._pushing.wait()
            summed = self._summing.summed_on_host(rows, payload, self._reading.sums_on_host, self._num_updates)
            sums = self._servers.stage(*summed, self._num_updates)
            totals, squares = self._feed.totals(sums)
            payload, metrics = None, with_squares(metrics, squares)
        given = (dense, totals)
        moved = (state.step, state.params, state.opt_state)
        step, params, opt_state, numbers = self._programs.apply(*moved, given, metrics["loss"])
        self._pushing.begin(self._push, rows, payload, numbers, self._num_updates)
        state = replace(state, step=step, params=params, opt_state=opt_state, variables=variables)
        return self._own(state, self._num_updates + 1), metrics

    def evaluate(self, state: State, batch: Any) -> dict[str, Any]:
        """Computes the metrics of a batch with `train=False`. **Arguments, Returns:** as of `Step.evaluate`."""
        self._check_state(state)
        made = self._programs.evaluation(specs_of(batch))
        state, batch = place(state, self.state_shardings), place(batch, made.batch_shardings)
        ids = made.ids(state.variables, state.key, state.step, batch)
        self._pushing.wait()
        fed = fed_with(made.reading, *self._pulling.pull(ids))
        self._in_flight.make_room()
        metrics = made.run(state.params, fed, state.variables, state.key, state.step, batch)
        self._in_flight.add(metrics["loss"])
        return metrics

    @property
    def staleness(self) -> dict[int, int]:
        """How many updates have read rows that lacked so many updates, by that number: 0 where nothing was late."""
        return dict(sorted(self._lags.items()))

    def finish(self) -> None:
        """Waits until servers have all that was pushed. **Raises:** what became of that."""
        self._pushing.wait()

    def resize(self, num_servers: int) -> None:
        """Lets another number of servers have the tables, from the next update on; the others are spare.

        Row `id` is then on number `id mod num_servers` of them. Servers that are to have it copy what they lack from
        those that have it, while the former parts are there still; when all have all, they go on with the new ones. No
        number depends on it but those of sums over rows, such as a global norm, in their last digits. It may be called
        any number of times, between two updates; all processes call it. The log says how long it took.
        `prepare_resize` before leaves less to copy.

        **Arguments:** `num_servers`: at least as many as `Served` has copies, at most the ranks of the gang that are
        not lost. As many as there are: nothing is done.

        **Raises:** `ArgumentError` for another number. `CallFailed` where a server has no room in its memory or on its
        disk; `PeerLost` where one is lost, or a process that trains: tables then stay where they were.
        """
        self._quiet()
        self._servers.resize(num_servers)
        self._pulling.divide()

    def _quiet(self) -> None:
        """Returns when servers have all that was pushed, and nothing is being pulled; all processes call it."""
        self._pushing.wait()
        self._pulling.wait()

    def prepare_resize(self, num_servers: int) -> None:
        """Begins to copy rows to where `resize(num_servers)` wants them, and returns: training goes on meanwhile.

        `resize` then waits for what is still to be copied, and copies once more what updates have moved since. Until
        then servers have room for the parts that are coming beside those that they have. What was begun for another
        number is let go of; for as many as there are nothing is begun. Of tables that grow nothing is copied ahead. All
        processes call it, between two updates.

        **Arguments:** `num_servers`: as of `resize`. **Raises:** `ArgumentError`; where a server has no room, `resize`
        says so.
        """
        self._pushing.wait()
        self._servers.prepare_resize(num_servers)

    def close(self, *, others: Literal["wait", "leave"] = "wait") -> None:
        """Ends the servers' part in this: what they have is gone. A second call does nothing.

        **Arguments:** `others`: whether other processes of the run are waited for, until they close theirs.
        """
        self._thread.shutdown(cancel_futures=True)
        self._threads.shutdown()
        self._publisher.close()
        self._servers.close(others=others)

    def __enter__(self) -> "ServedStep":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(others="wait" if error is None else "leave")

    # Tables, besides training

    @property
    def tables(self) -> ServedTables:
        """Stands for the tables in a checkpoint: `saver.update((state, step.tables))`, and so in `restore`."""
        return self._tables

    def table(self, name: str) -> NDArray[Any]:
        """Returns a table as single-device training has it now, on the host; all processes call it.

        **Arguments:** `name`: such as "embed".

        **Raises:** `ArgumentError` for what is on no server.
        """
        if name not in self._feed.tables:
            raise ArgumentError(f"table={name!r} is not on servers, expected one of {[*self._feed.tables]}")
        check_has_all_rows(self._forms, "step.table")
        self._pushing.wait()
        shape = self._feed.tables[name].shape
        return self._servers.whole.values(name, 0, shape[0]).reshape(shape)

    def seen_rows(self, name: str) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Returns the rows of a table that grows as `Seen` that are there now; all processes may call it.

        **Arguments:** `name`: such as "embed". **Returns:** their ids, `[m]`, in order, and these rows, `[m, …]`.

        **Raises:** `ArgumentError` for a table that has all rows, or is on no server.
        """
        if name not in self._feed.tables or self._forms[name].seen is None:
            raise ArgumentError(
                f"table={name!r} does not grow, expected one of "
                f"{[one for one, form in self._forms.items() if form.seen is not None]}; step.table(name) reads others"
            )
        self._pushing.wait()
        found = list_rows(self._servers, self._forms[name], "values", 0, self._forms[name].shape[0])
        return found.arrays["ids"], found.arrays["values"].reshape(-1, *self._forms[name].shape[1:])

    def publish(self, folder: str | os.PathLike[str]) -> None:
        """Writes the tables, as of the last update, for others who read them: `read_published`, `Published`.

        The first file has all rows; each later one has those that have changed since the one before, a delta. All rows
        are written again where what has changed is not known: when another step goes on with the folder, behind `init`,
        `from_dense` and a restored checkpoint; and where most had changed at the file before, as by weight decay. Of a
        table that grows, files have the rows that are there, and deltas those that are gone. A file is there once it is
        whole and durable. All processes call this, and process 0 writes; where rows move without a gradient it reads
        all of them, and keeps 24 bytes of each.

        **Arguments:** `folder`: a new one, an empty one, or one that was published into; this step keeps it locked.

        **Raises:** `ArgumentError` where it cannot be written to, has files of others, or other tables. `FormatError`
        where its newest file is damaged. `PeerLost` when a server is gone.
        """
        step = self._settled()
        try:
            if jax.process_index() == 0:
                self._publisher.publish(folder, step)
        finally:
            self._servers.meet()

    def to_dense(self, state: State) -> State:
        """Returns a state as single-device training has it, with all tables, on the host; all processes call it.

        **Arguments:** `state`: the last one. **Raises:** as `Step.to_dense`.
        """
        check_has_all_rows(self._forms, "step.to_dense")
        self._check_state(state)
        self._feed.dense_state()
        self._pushing.wait()
        return dense_of(state, self._form, self._feed, self._servers, self._forms)

    def from_dense(self, state: State) -> State:
        """Returns the state of this step from one that single-device training, or `to_dense`, has; tables go to the
        servers, in place of what these have.

        **Raises:** as `Step.from_dense`.
        """
        check_has_all_rows(self._forms, "step.from_dense")
        specs = self._form.dense_specs()
        if message := difference(specs, state, "state"):
            raise ArgumentError(f"{message}: pass a state in the form of single-device training, with this optimizer")
        self._pushing.wait()
        self._pulling.forget()
        num_updates = int(state.step)
        write_dense(state, self._feed, self._servers, self._forms)
        mine = self._form.from_dense(state)
        return self._own(adopt(mine, self.state_shardings), num_updates)

    def _settled(self) -> int:
        self._pushing.wait()
        return self._num_updates

    def _restored(self, num_updates: int) -> None:
        """Goes on from a state that was restored with the tables."""
        self._pulling.forget()
        self._last, self._num_updates = None, num_updates

    # What the host does

    def _push(self, rows: Mapping[str, BatchRows], payload: Any, numbers: Any, step: int) -> None:
        """Brings the gradients of rows to the servers, when they are there."""
        gradients = None  # they were staged
        if payload is not None:
            rows, gradients = self._summing.summed_on_host(rows, payload, self._reading.sums_on_host, step)
        told = {name: [np.asarray(number) for number in some] for name, some in numbers.items()}
        self._servers.push(rows, gradients, told, step)

    def _check_batch(self, batch: Any) -> None:
        if message := difference(self._batch_specs, canonical(batch), "batch"):
            raise ArgumentError(f"{message}: give parallelize the batch={{…}} that the loader yields")
