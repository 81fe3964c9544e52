"""`WorkerStep`: a step of one of several workers, whose variables are all on servers."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from braidax.cores import usable_cores
from braidax.errors import ArgumentError
from braidax.parallel.compiler_options import CompilerOptions
from braidax.parallel.compute.in_flight import InFlight
from braidax.parallel.compute.work import GRAD_NORM, Work
from braidax.parallel.given.arrays import canonical, place, typed_key, with_shardings
from braidax.parallel.plan.parameter_servers import ParameterServers
from braidax.parallel.run_ahead import check_coming
from braidax.parallel.served.batches.batch_rows import BatchRows, Reads, Rows
from braidax.parallel.served.batches.pulling import Pulling, fed_with
from braidax.parallel.served.batches.pushing import Pushing, Summing
from braidax.parallel.served.compiled import Evaluation
from braidax.parallel.served.compressed.travelling import Travelling
from braidax.parallel.served.feed import ServedFeed
from braidax.parallel.served.meetings.joining import join_alone, num_servers_of
from braidax.parallel.served.saved import ServedTables
from braidax.parallel.served.servers import Servers
from braidax.parallel.state import State
from braidax.program import Program, difference, named_leaves, specs_of

from .border import Border
from .dealing import Dealing, Dealt
from .programs import WorkerPrograms, draws_by
from .saved import ServedVariables, params_of


@final
class WorkerStep:
    """A training step of one worker of several, which servers have the variables of; `parallelize` makes it, to be
    closed.

    An update pulls what its batch reads, computes gradients, and pushes them behind that, while the caller goes on. How
    far workers may be apart is the strategy's `staleness`. A state has the number of updates that this worker has
    taken, and its key; whatever is trained servers have.

    **Arguments:** `work`, without a feed where no variable is read by rows. `born`: traced `key -> Born`. `batch`:
    specs, of a worker's own samples. `servers`: a gang, or a meeting of a worker; None for those of `braidax launch`.
    """

    def __init__(
        self,
        work: Work,
        born: Program,
        batch: Any,
        strategy: ParameterServers,
        servers: Any,
        *,
        batch_shardings: Any,
        compiler_options: CompilerOptions,
    ) -> None:
        feed = work.feed if isinstance(work.feed, ServedFeed) else None
        if jax.tree.leaves(work.form.specs.variables):
            raise ArgumentError(
                "loss_fn asks for variables, which ParameterServers does not take: a microbatch goes on from those "
                "that the one before has left, and workers compute theirs at the same time; expected a loss without, "
                'as with LayerNorm, or DataParallel() and Hybrid(tables="servers"), which compute them once'
            )
        self.mesh, self.plan, self.batch_shardings = work.mesh, work.plan, batch_shardings
        self._form, self._batch_specs, self._strategy = work.form, batch, strategy
        border = Border(work)
        self._programs = WorkerPrograms(work, batch_shardings, compiler_options, border)
        self._in_flight = InFlight(self.mesh)
        self._in_flight.calls_host = work.calls_host
        self._lags: Counter[int] = Counter()
        self._num_updates = -1  # before there is a state
        self._last: weakref.ref[jax.Array] | None = None  # the step of the last one
        self._key: Any = None  # its key
        made, self._wants_norm = self._programs.rows, work.wants_norm
        self._forms = {} if feed is None else feed.forms(born)
        dealt = Dealt(work, border, num_servers_of(servers), strategy)  # before others wait for this one
        joined = join_alone(servers, copies=strategy.copies)
        self.worker, self.num_workers = joined.worker, joined.meeting.num_workers
        self._place = self.worker, self.num_workers, self.plan.microbatches
        self._servers = Servers(
            joined,
            self._forms,
            staleness=strategy.staleness,
            copies=strategy.copies,
            spares=strategy.spares,
            travelling=Travelling(strategy.wire, {} if made is None else made.reading.read_as),
            dense=dealt.forms,
        )
        self._dealing = Dealing(self._servers, dealt, self._forms, wants_norm=work.wants_norm)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="braidax-workers")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="braidax-ahead")  # waits for no push
        self._threads = ThreadPoolExecutor(usable_cores(), thread_name_prefix="braidax-summing")
        self._summing, self._pushing = Summing(self._threads), Pushing(self._servers, self._thread)
        ahead: Reads = "rows" if strategy.staleness == 0 else "training"  # what is whole moves in each update
        self._pulling = None if feed is None else Pulling(self._servers, feed, self._ahead, ahead=ahead)
        tables = ServedTables(self._servers, self._forms, self._settled, self._adopt)
        self._saved = ServedVariables(self._servers, tables, self._settled, self.worker)

    def init(self, key: jax.Array) -> State:
        """Makes the first state, and the variables on the servers; all workers call it with the same key.

        **Raises:** as `Step.init`.
        """
        key = typed_key(key)
        if difference(self._form.specs.key, key, "key"):
            raise ArgumentError(f"key is {key!r}, expected one {self._form.specs.key.dtype}: jax.random.key(seed)")
        self._pushing.wait_for_own()
        self._lags.clear()
        self._servers.bear(key)
        self._adopt(0)
        on = self._form.shardings
        return self._own(self._state(place(np.int32(0), on.step), self._programs.key(place(key, on.key))))

    def _state(self, step: Any, key: Any) -> State:
        return State(step, (), (), self._form.specs.variables, key)

    def _own(self, state: State) -> State:
        self._last, self._key = weakref.ref(state.step), state.key
        return state

    @property
    def state_specs(self) -> State:
        """Of every leaf of a state shape, dtype and sharding; all that is trained servers have."""
        return with_shardings(*(self._state(one.step, one.key) for one in (self._form.specs, self._form.shardings)))

    def meet(self, state: State) -> State:
        """Returns when all workers have called it, with a state that goes on from what servers have then, with the key
        of the first worker.

        They call it behind the first one's `saver.restore((state, step.variables))`.
        """
        self._pushing.wait_for_own()
        self._servers.meet()
        data = self._servers.of_first(np.asarray(jax.random.key_data(state.key)))
        self._servers.forget()
        self._adopt(self._servers.num_updates())
        self._servers.meet()
        key, on = jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(state.key)), self._form.shardings
        return self._own(self._state(place(np.int32(self._num_updates), on.step), place(key, on.key)))

    def of_first(self, value: NDArray[Any]) -> NDArray[Any]:
        """Returns what the first worker gives; all workers call it. **Arguments:** `value`: alike in form."""
        return self._servers.of_first(value)

    @property
    def fetches_ahead(self) -> bool:
        """Whether rows of coming batches are pulled ahead and never late, so that `fit` tells what comes."""
        return self._pulling is not None and self._strategy.staleness == 0

    def _adopt(self, num_updates: int) -> None:
        if self._pulling is not None:
            self._pulling.forget()
        self._num_updates = num_updates
        self._servers.agreement.begin(num_updates)

    def _settled(self, *, behind: int = 0) -> int:
        """Returns how many updates servers have seen: all copies all that this worker has, but for `behind`."""
        self._pushing.wait_for_own()
        taken = 0 if self._strategy.staleness is None else self._num_updates - behind
        return self._servers.num_updates(at_least=taken)

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, State) or self._num_updates < 0 or difference(self._form.specs.key, state.key, "key"):
            raise ArgumentError(f"state is {type(state).__name__}: expected one that came from this step's init")
        if self._last is None or self._last() is not state.step:
            raise ArgumentError(
                f"state is not the last one that this step has returned, and this worker has taken {self._num_updates} "
                f"updates: go on with that one, begin by init, or pass a restored one to step.meet, as all workers do"
            )

    # Updates

    def prepare(self, batch: Any) -> None:
        """Begins to pull the rows that a coming batch reads, while others are trained. Returns at once.

        Rows that updates move in the meantime are pulled once more where they may not be late, so that nothing changes
        but the time. Several batches may be prepared, in the order in which they come; each serves the update that gets
        the very arrays. Where the loss reads no variable by rows, nothing is done.

        **Arguments:** `batch`: as of `update`, of device arrays.

        **Raises:** `ArgumentError` for batches of another form, or host arrays.
        """
        self._prepare(batch, self._num_updates + (0 if self._pulling is None else self._pulling.num_coming))

    def _prepare(self, batch: Any, step: int) -> None:
        """Begins to pull what a batch reads. **Arguments:** `step`: the update that it will be for."""
        self._check_batch(batch)
        check_coming(batch, "batch")
        made = self._programs.rows
        if made is None or self._pulling is None or self._key is None or not made.reading.knows_ahead:
            return
        on = self._form.shardings
        key, number = place((self._key, np.int32(step)), (on.key, on.step))
        draw = draws_by(key, number, self._programs.next(key, number)[0], self._place)
        ids = made.ids(self._form.specs.variables, *draw, place(batch, self.batch_shardings))
        self._pulling.begin(jax.tree.leaves(batch), ids, step if made.reading.draws_ids else None)

    def _check_batch(self, batch: Any) -> None:
        if message := difference(self._batch_specs, canonical(batch), "batch"):
            raise ArgumentError(f"{message}: give parallelize the batch={{…}} that the loader yields")

    def update(
        self, state: State, batch: Any, *, coming: Any = None, before_apply: Callable[[], object] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Takes one training step of this worker.

        **Arguments:** `state`: of this step. `batch`: of this worker's samples. `coming`: the next one, if it is known,
        for `prepare`. `before_apply`: as of `Step.update`.

        **Returns:** the new state, and the metrics of this worker's batch, as of `Step.update`.

        **Raises:** `ArgumentError` when state or batch are not like the ones the step was made for, or servers refuse.
        `DataError` for ids out of range, with `out_of_range="raise"`. `PeerLost` when a server is gone, or, where an
        update takes all, another worker.
        """
        self._check_state(state)
        self._check_batch(batch)
        self._servers.recover(number := self._num_updates, self._settle_alike)
        ahead = None if self._pulling is None else self._pulling.take(jax.tree.leaves(batch), number)
        if coming is not None:
            self._prepare(coming, number + 1 + (0 if self._pulling is None else self._pulling.num_coming))
        batch = place(batch, self.batch_shardings)
        drawn, step = self._programs.next(state.key, state.step)
        key = draws_by(state.key, state.step, drawn, self._place)
        bound = self._strategy.staleness
        behind = 1 if bound is None else bound  # asynchronously a push travels beside the next batch
        self._pushing.wait_for_own(behind=behind)
        made = self._programs.rows
        if ahead is None:
            rows, pulled = self._pull(None if made is None else made.ids(state.variables, *key, batch), "training")
        else:
            assert self._pulling is not None, "it was taken from it"
            rows, pulled, _ = self._pulling.coming(ahead)
            if bound == 0 or (bound is not None and pulled.step < number - bound):
                pulled = self._servers.pull(rows, known=pulled, at_least=number - bound, reads="training")
        if bound is not None:
            self._lags[max(0, number - pulled.step)] += 1
        params = self._placed(pulled.whole)
        fed = () if made is None else fed_with(made.reading, rows, pulled)
        self._in_flight.make_room()
        given, variables, metrics = self._programs.gradients(params, fed, state.variables, *key, batch)
        self._in_flight.add(metrics["loss"])
        if before_apply is not None:
            before_apply()
        dense, payload = (given, {}) if made is None else given
        pushed = self._pushing.begin(self._push, rows, payload, dense, metrics["loss"], number, pulled)
        self._num_updates += 1
        if self._wants_norm:
            metrics = {**metrics, GRAD_NORM: pushed.result()}
        return self._own(replace(state, step=step, variables=variables)), metrics

    def evaluate(self, state: State, batch: Any) -> dict[str, Any]:
        """Computes the metrics of a batch with `train=False`. **Arguments, Returns:** as of `Step.evaluate`."""
        self._check_state(state)
        made = self._programs.evaluation(specs_of(batch))
        batch = place(batch, made.batch_shardings)
        ids = made.ids(state.variables, state.key, state.step, batch) if isinstance(made, Evaluation) else None
        self._pushing.wait_for_own()
        rows, pulled = self._pull(ids)
        params = self._placed(pulled.whole)
        fed = fed_with(made.reading, rows, pulled) if isinstance(made, Evaluation) else ()
        run = made.run if isinstance(made, Evaluation) else made.compiled
        self._in_flight.make_room()
        metrics = run(params, fed, state.variables, state.key, state.step, batch)
        self._in_flight.add(metrics["loss"])
        return metrics

    def _pull(self, ids: Any, reads: Reads = "all") -> tuple[Mapping[str, BatchRows], Rows]:
        """Returns what a batch reads, with as many updates as it may not lack."""
        bound = self._strategy.staleness
        at_least = 0 if bound is None else self._num_updates - bound
        if self._pulling is None or ids is None:
            return {}, self._servers.pull({}, at_least=at_least, reads=reads)
        return self._pulling.pull(ids, at_least=at_least, reads=reads)

    def _placed(self, whole: Mapping[str, NDArray[Any]]) -> Any:
        """Brings what servers have whole to the devices, as the loss has it."""
        specs = self._form.specs.params
        leaves = [whole[name] for name, _ in named_leaves(specs)]
        return place(jax.tree.unflatten(jax.tree.structure(specs), leaves), self._form.shardings.params)

    def _push(
        self,
        rows: Mapping[str, BatchRows],
        payload: Mapping[str, jax.Array],
        dense: Any,
        loss: jax.Array,
        number: int,
        pulled: Rows,
    ) -> Any:
        """Brings gradients to the servers, when they are there. **Returns:** the norm of the update, or None."""
        made = self._programs.rows
        gradients = {} if made is None else self._summing.summed(rows, payload, made.reading.sums_on_host)
        whole = {name: np.asarray(leaf) for name, leaf in named_leaves(dense)} | {"": np.asarray(loss)}
        norm = None
        if (gathering := self._dealing.gathering) is not None:
            gathered = gathering.gather(rows, gradients, number, whole)
            norm = jnp.asarray(gathered.norm) if self._wants_norm else None
            seen = gathering.push(gathered, number)
        else:
            seen = self._servers.push(rows, gradients, dict.fromkeys(rows, ()), number, whole)
        if self._strategy.staleness is None:
            self._lags[max(0, seen - 1 - pulled.step)] += 1
        return norm

    @property
    def staleness(self) -> dict[int, int]:
        """How many updates of this worker have been of variables that lacked so many, by that number; asynchronously
        those of all workers that came between."""
        return dict(sorted(self._lags.items()))

    def finish(self) -> None:
        """Waits until servers have all that this worker has pushed. **Raises:** what became of that."""
        self._pushing.wait_for_own()

    def ends(self, *, wanted: bool) -> bool:
        """Returns whether this worker is to end now: where an update takes all, behind the same one as all others.

        Each asks before an update. When one wants to, all end two updates later, and as many as they may be apart: each
        has heard of it then. Asynchronously each ends when it wants.

        **Arguments:** `wanted`: whether this one wants to.
        """
        if (bound := self._strategy.staleness) is None:
            return wanted
        agreement = self._servers.agreement
        if wanted and agreement.end is None:
            agreement.end_behind(self._num_updates + bound + 2, taken=self._num_updates)
        return agreement.end is not None and self._num_updates >= agreement.end

    def resize(self, num_servers: int) -> None:
        """Lets another number of servers have all variables, from the next update on; all workers call it.

        Rows lie as `ServedStep.resize` says. Variables that one server has whole are dealt out anew, and copied with
        what the optimizer keeps of them. No update is lost, and nothing changes but the last digits of sums over all
        gradients. Where an update takes the gradients of all, all call it behind the same one; asynchronously it waits
        for each to come.

        **Arguments:** `num_servers`: at least as many as the strategy has copies, at most the ranks of the gang that
        are not lost; its `spares` keeps some of them for later. As many as there are: nothing is done.

        **Raises:** `ArgumentError` for another number, or workers behind other updates. `CallFailed` where a server has
        no room; `PeerLost` where one is lost, or a worker: everything then stays where it was.
        """
        self._settle_alike()
        self._dealing.resize(num_servers)
        if self._pulling is not None:
            self._pulling.divide()

    def prepare_resize(self, num_servers: int) -> None:
        """As `ServedStep.prepare_resize`, for `resize`; all workers call it. **Arguments, Raises:** as of that."""
        self._settle_alike()
        self._dealing.prepare_resize(num_servers)

    def _settle_alike(self) -> None:
        """Returns when all workers have called it, servers have all that was pushed, and nothing is being pulled."""
        self._pushing.wait_for_own()
        if self._pulling is not None:
            self._pulling.wait()
        self._servers.check_alike(0 if self._strategy.staleness is None else self._num_updates)

    def close(self) -> None:
        """Ends this worker's part; others go on, unless an update takes all. Servers end with the last one, and what
        they have is gone. A second call does nothing."""
        self._ahead.shutdown(cancel_futures=True)
        self._thread.shutdown(cancel_futures=True)
        self._threads.shutdown()
        self._servers.close()

    def __enter__(self) -> "WorkerStep":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Variables, besides training

    @property
    def variables(self) -> ServedVariables:
        """Stands for all that servers have in a checkpoint, which the first worker saves:
        `saver.update((state, step.variables))`, and so in `restore`."""
        return self._saved

    def params(self) -> Any:
        """Returns all variables on the host, as a PyTree like `init`'s, with as many updates as the next one reads."""
        self._settled(behind=self._strategy.staleness or 0)
        return params_of(self._servers, self._forms, self._pull(None)[1].whole, self._form.born.params)
