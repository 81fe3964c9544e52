"""`Step`: a loss and an optimizer on a mesh, as two jitted functions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError
from braidax.program import compile_on, difference, spec_of, specs_of

from .compiled_step import CompiledStep, compile_step, target_mesh
from .compiler_options import CompilerOptions
from .compute.in_flight import InFlight
from .compute.late_checks import LateChecks
from .compute.work import Work
from .given.arrays import adopt, canonical, check_made, place, typed_key, with_shardings
from .given.asking import Asking
from .plan.plan import Plan
from .plan.replanning import way_to
from .readings import Readings
from .run_ahead import RunAhead, check_coming
from .state import Origin, State, Way
from .wrapped import Wrapped

Coming = Literal["known", "unknown"]
"""Whether an update is told the batch that comes behind its own."""


class Lowered(NamedTuple):
    """The two programs of a step before compilation, as `jax.stages.Lowered`."""

    gradients: jax.stages.Lowered
    apply: jax.stages.Lowered


class Step:
    """A training step on a mesh; `parallelize` makes it.

    An update is two jitted functions, gradients and apply. The first gives nothing up, so that a snapshot of the
    state can be copied while it runs; the second takes over the memory of the old state.
    """

    def __init__(
        self,
        work: Work,
        batch: Any,
        batch_shardings: Any,
        *,
        compiler_options: CompilerOptions | None = None,
        replanned: "Callable[[Plan], Step] | None" = None,
        rekeyed: Callable[[jax.ShapeDtypeStruct], Work] | None = None,
        elsewhere: "Callable[[Mesh], Step] | None" = None,
    ) -> None:
        self.mesh = work.mesh
        self.batch_shardings = batch_shardings
        self._batch_specs = batch
        self._compiler_options = CompilerOptions() if compiler_options is None else compiler_options
        self._replanned, self._rekeyed, self._elsewhere = replanned, rekeyed, elsewhere
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._late = LateChecks(work.checks)
        self._in_flight = InFlight(self.mesh)
        self._num_updates = 0
        self._prepare(work)

    def _prepare(self, work: Work) -> None:
        """Makes the programs of a step; each is compiled at its first call."""
        self._work, mesh, options = work, self.mesh, self._compiler_options
        self._in_flight.calls_host = work.calls_host
        self.plan = work.plan
        self._state_specs: State = work.form.initial.out_specs
        self.state_shardings = held = work.form.shardings
        self._gradients = compile_on(
            mesh,
            work.gradients,
            in_shardings=(*self._read, self.batch_shardings),
            out_shardings=(work.gradient_shardings, held.variables, work.metric_shardings),
            compiler_options=options.gradients,
        )
        # The gradients are not donated: the old state already gives its memory to every output.
        self._apply = compile_on(
            mesh,
            work.apply,
            in_shardings=(held.step, held.params, held.opt_state, work.gradient_shardings, self._replicated),
            out_shardings=(held.step, held.params, held.opt_state),
            donate=(0, 1, 2),
            compiler_options=options.apply,
        )
        self._init = compile_on(mesh, work.form.initial, in_shardings=(self._replicated,), out_shardings=held)
        self._begun = compile_on(
            mesh, work.form.begun, in_shardings=(self._replicated, held.params), out_shardings=held, donate=(1,)
        )
        self._ahead = RunAhead(work, self.batch_shardings, options) if work.is_fed else None
        self._readings = Readings(work, self._read, options.apply)
        self._conversions: dict[Callable[[State], State], Any] = {}

    @property
    def _read(self) -> tuple[Any, ...]:
        """The shardings of what gradients and evaluations read of a state."""
        return self._readable(self.state_shardings)

    def _readable(self, state: State) -> tuple[Any, ...]:
        held = self._work.held(state.opt_state)
        return state.params, held, state.variables, state.key, state.step

    def init(self, key: jax.Array, params: Any = None) -> State:
        """Makes the first state, every leaf born on the devices that hold it.

        **Arguments:** `key`: from `jax.random.key`, of any implementation; for another one than JAX is configured for
        the step is traced again. It is split: one half goes to `init`, the other into the state. One of
        `jax.random.PRNGKey` is taken for that of `jax.random.key`, with the same numbers. `params`: given up, to
        begin with in place of those of `init`, as a state has them, such as `restore_safetensors` and `restore` of
        `braidax.checkpoint` put into `state_specs` with `only="params/*"`.

        **Raises:** `ArgumentError` when `key` is no such key, or `params` are not like those of a state.
        """
        key = typed_key(key)
        is_key = jnp.issubdtype(getattr(key, "dtype", jnp.uint32), jax.dtypes.prng_key) and not key.shape
        if is_key and self._rekeyed is not None and key.dtype != self._state_specs.key.dtype:
            self._prepare(self._rekeyed(spec_of(key)))
        if difference(self._state_specs.key, key, "key"):
            raise ArgumentError(
                f"key is {getattr(key, 'dtype', type(key).__name__)}{list(getattr(key, 'shape', []))}, expected one "
                f"{self._state_specs.key.dtype}: make it with jax.random.key(seed)"
            )
        key = place(key, self._replicated)
        if params is None:
            return self._own(self._init(key))
        if message := difference(self._state_specs.params, params, "params"):
            raise ArgumentError(f"{message}: pass parameters as `params` of step.state_specs tells them")
        check_made(params)
        return self._own(self._begun(key, adopt(params, self.state_shardings.params)))

    @property
    def state_specs(self) -> State:
        """Of every leaf of a state shape, dtype and sharding: enough for a checkpoint to restore one."""
        return self._own(with_shardings(self._state_specs, self.state_shardings))

    def _own(self, state: State) -> State:
        """Returns a state that knows that it is of this step, for those who restore it from that of another plan."""
        return replace(state, origin=Origin(self._way_to))

    def _way_to(self, saved: Mapping[str, int | None]) -> Way:
        return None if self._replanned is None else way_to(self, self._replanned, saved)

    @property
    def fetches_ahead(self) -> bool:
        """Whether an update fetches something of a batch that it is told is coming: rows of tables."""
        return self._ahead is not None

    def update(
        self, state: State, batch: Any, *, coming: Any = None, before_apply: Callable[[], object] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Takes one training step. Returns at once; nothing waits for the devices.

        On CPU devices it stays at most `in_flight.MAX_IN_FLIGHT` updates ahead of them, lest XLA end the process.

        **Arguments:** `state`: given up, use the new one. `batch`: PyTree as `parallelize` was told, of global arrays,
        or of host arrays that are copied. `coming`: the batch of the next update, of device arrays, if it is known:
        rows of tables that it reads are fetched while this batch is trained, as this update leaves them. What was
        fetched serves the next update if that gets this state and that batch, the very arrays; else it is fetched anew.
        `before_apply`: called when the gradients are dispatched, before anything of the old state is overwritten
        (`saver.wait`).

        **Returns:** the new state and the metrics: `loss` and what the loss returns as aux; arrays in it that go along
        the samples, such as logits, stay divided among the devices as the batch is.

        **Raises:** `ArgumentError` when state or batch are not like the ones the step was made for. `DataError` when
        an earlier batch had ids out of range, with `Hybrid(out_of_range="raise")`; the state given is then still valid.
        """
        self._check_state(state)
        self._late.check()
        self._check_batch(batch, "batch")
        if coming is not None:
            check_coming(coming)
            self._check_batch(coming, "coming")
        ahead, fetched = self._ahead, None if self._ahead is None else self._ahead.take(state, batch)
        told, coming = coming, None if coming is None else place(coming, self.batch_shardings)
        state, batch = adopt(state, self.state_shardings), place(batch, self.batch_shardings)
        self._in_flight.make_room()
        if ahead is None or fetched is None or coming is None:
            gradients, variables, metrics = self._gradients(*self._readable(state), batch)
            fetched = None
        else:
            gradients, variables, metrics, fetched = ahead.gradients(state, batch, fetched, coming)
        self._in_flight.add(metrics["loss"])
        if before_apply is not None:
            before_apply()
        step, params, opt_state = self._apply(state.step, state.params, state.opt_state, gradients, metrics["loss"])
        self._num_updates += 1
        state = replace(state, step=step, params=params, opt_state=opt_state, variables=variables)
        if ahead is not None and coming is not None:
            ahead.keep(state, told, ahead.fetch(state, coming) if fetched is None else fetched)
        return state, self._late.take(metrics, f"the batch of update {self._num_updates} of this step")

    def evaluate(self, state: State, batch: Any) -> dict[str, Any]:
        """Computes the metrics of a batch with `train=False`; the state is neither changed nor given up.

        **Arguments:** `batch`: like the one for training, or of another size or structure (a `mask`): each form is
        compiled once.

        **Returns:** the metrics, as of `update`.
        """
        self._check_state(state)
        self._late.check()
        made = self._readings.of(None, canonical(batch))
        state, batch = place(state, self.state_shardings), place(batch, made.batch_shardings)
        self._in_flight.make_room()
        metrics = made.compiled(*self._readable(state), batch)
        self._in_flight.add(metrics["loss"])
        what = f"the batch of an evaluation behind update {self._num_updates} of this step"
        return self._late.take(metrics, what)

    def wrap(self, fn: Callable[..., Any], *, batch: Any = None) -> Wrapped:
        """Makes a function of a state and a batch from `fn(params, batch)`: predictions, generated text, an export.

        It is compiled for states as they lie, so that no state is made whole: weights are gathered where `fn` uses
        them, rows of tables are fetched.

        **Arguments:** `fn`: for one device and the whole batch. It may ask by name for what a loss may: `key`
        (`fold_in(state.key, state.step)`; for other random numbers put keys into the batch, one a sample), `variables`
        and `train`, which is False. It returns any PyTree of arrays. `batch`: PyTree of `jax.ShapeDtypeStruct`, by
        default that of the step.

        **Returns:** the function; what descends from the batch comes split as that is, the rest on every device.

        **Raises:** `ArgumentError`, `SpecError` or `StateError` naming what does not fit.
        """
        asking, specs = Asking(fn, "fn"), self._batch_specs if batch is None else specs_of(batch)
        made = self._readings.of(asking, specs)
        run, lower = partial(self._run, asking, specs), partial(self._lower, asking, specs)
        return Wrapped(run, lower, made.batch_shardings, made.out_shardings)

    def _run(self, fn: Asking, specs: Any, state: State, batch: Any) -> Any:
        self._check_state(state)
        self._late.check()
        if message := difference(specs, canonical(batch), "batch"):
            raise ArgumentError(f"{message}: give Step.wrap the batch={{…}} that it is called with")
        made = self._readings.of(fn, specs)
        state, batch = place(state, self.state_shardings), place(batch, made.batch_shardings)
        self._in_flight.make_room()
        result, checked = made.compiled(*self._readable(state), batch)
        self._in_flight.add(min(jax.tree.leaves(result), key=lambda leaf: leaf.size))
        self._late.take(checked, f"the batch of {fn.name} behind update {self._num_updates} of this step")
        return result

    def _lower(self, fn: Asking, specs: Any) -> jax.stages.Lowered:
        made = self._readings.of(fn, specs)
        return made.compiled.lower(*self._readable(self.state_specs), with_shardings(specs, made.batch_shardings))

    def finish(self) -> None:
        """Waits for all updates and evaluations so far, and looks at what is otherwise looked at some updates later.

        Call it behind the last update; `fit` and `evaluate` do.

        **Raises:** `DataError` when a batch had ids out of range, with `Hybrid(out_of_range="raise")`.
        """
        self._late.check(late=1)

    def settled(self, state: State) -> State:
        """Returns a state in which no row lags behind; the one given stays as it is.

        An optimizer such as Adam moves all rows of a table at each step; a step that exchanges rows moves those that it
        does not touch when they are next read. Who reads a state otherwise, to export it, say, settles it first.

        **Arguments:** `state`: of this step. **Returns:** the state of single-device training, in this step's form.
        """
        self._check_state(state)
        self.finish()
        return self._own(self._converted(self._work.form.settled, state, self.state_shardings, self.state_shardings))

    def to_dense(self, state: State) -> State:
        """Returns a state as single-device training has it, and `parallelize` with `DataParallel`.

        Tables are `[V, ...]` and whole on every device; `opt_state` is that of `optimizer.init`. What was trained by
        rows is exported that way, or trained on otherwise: `other.from_dense(step.to_dense(state))`.

        **Arguments:** `state`: of this step. **Raises:** `ArgumentError` when a row optimizer of one's own has no such
        form.
        """
        self._check_state(state)
        self.finish()
        replicated = jax.tree.map(lambda _: self._replicated, self._work.form.dense_specs())
        whole = self._converted(self._work.form.to_dense, state, self.state_shardings, replicated)
        return replace(whole, origin=Origin())

    def from_dense(self, state: State) -> State:
        """Returns the state of this step from one that single-device training, or `to_dense`, has.

        **Raises:** as `to_dense`; `ArgumentError` when the state is not like that of these parameters and optimizer.
        """
        specs = self._work.form.dense_specs()
        if message := difference(specs, state, "state"):
            raise ArgumentError(f"{message}: pass a state in the form of single-device training, with this optimizer")
        replicated = jax.tree.map(lambda _: self._replicated, specs)
        return self._own(self._converted(self._work.form.from_dense, state, replicated, self.state_shardings))

    def adopt(self, state: State, step: "Step") -> State:
        """Returns a state to go on with from that of another step, which was planned otherwise.

        Both are of the same parameters, optimizer and mesh. Where tables are split over the same axes nothing is
        moved; otherwise they are whole on every device for a moment.

        **Arguments:** `state`: of `step`; it stays valid. **Raises:** as `to_dense` and `from_dense`.
        """
        old, new = step._work, self._work
        if step.mesh != self.mesh or old.form.layouts != new.form.layouts:
            return self.from_dense(step.to_dense(state))
        return self._own(step.settled(state))

    def check_adoptable(self, step: "Step") -> None:
        """Checks that `adopt` can go on from states of another step. **Raises:** `ArgumentError` when it cannot."""
        if step.mesh != self.mesh or step._work.form.layouts != self._work.form.layouts:
            for work in (step._work, self._work):
                work.form.dense_specs()

    def _converted(self, convert: Callable[[State], State], state: State, given: Any, wanted: Any) -> State:
        if convert not in self._conversions:
            self._conversions[convert] = compile_on(self.mesh, convert, in_shardings=(given,), out_shardings=wanted)
        return self._conversions[convert](place(state, given))

    def lower(self, *, coming: Coming = "unknown") -> Lowered:
        """Lowers both functions for inspection, from shapes alone.

        **Arguments:** `coming`: whether updates are told the coming batch. **Returns:** `Lowered(gradients, apply)`;
        `.compile().memory_analysis()` tells what each needs. **Raises:** `ArgumentError` as `compile_for`.
        """
        state, told, read = self.state_specs, self._read_specs(coming), self._read_specs("unknown")
        gradients, _, metrics = self._gradients.eval_shape(*read)
        first = self._gradients.lower(*read) if coming == "unknown" else self._fetching().lower(told)
        apply = self._apply.lower(state.step, state.params, state.opt_state, gradients, metrics["loss"])
        return Lowered(first, apply)

    def _read_specs(self, coming: Coming) -> tuple[Any, ...]:
        """Returns what the gradients are given, as specs with shardings."""
        state, batch = self.state_specs, with_shardings(self._batch_specs, self.batch_shardings)
        if coming not in ("known", "unknown"):
            raise ArgumentError(f'coming is {coming!r}, expected "known" or "unknown"')
        if coming == "unknown":
            return *self._readable(state), batch
        return self._fetching().read_specs(state, batch)

    def _fetching(self) -> RunAhead:
        if self._ahead is None:
            raise ArgumentError(
                'coming is "known", and the step fetches nothing ahead: no table is read by rows; expected "unknown"'
            )
        return self._ahead

    def compile_for(self, target: str, *, coming: Coming = "unknown") -> CompiledStep:
        """Compiles the step for a machine that need not be here, whose devices take the place of those of the mesh.

        What it says is that machine's own compiler's word; nothing is run, so that it tells no times.

        **Arguments:** `target`: such as `"h100:8"`, or `"v5e:4x4"`; with as many devices as the mesh has. `"here"`:
        the devices of the mesh. `coming`: whether updates are told the coming batch.

        **Returns:** memory and collectives; `print` shows them.

        **Raises:** `ArgumentError` for other targets, where the compiler refuses what is too large, and where a coming
        batch is "known" and `fetches_ahead` is not so; `MissingExtra`.
        """
        found, mesh = target_mesh(target, self.mesh)
        assert self._elsewhere is not None, "parallelize says how a step is made on other devices"
        step = self if mesh is self.mesh else self._elsewhere(mesh)
        state = step.state_specs
        batch = with_shardings(step._batch_specs, step.batch_shardings)
        held = {"parameters": state.params, "optimizer": state.opt_state, "variables": state.variables, "batch": batch}
        read, moved = step._read_specs(coming), (state.step, state.params, state.opt_state)
        if coming == "known":
            held |= {"fetched": read[6], "coming": read[7]}
        options = step.plan.compiler_options
        return compile_step(step.lower(coming=coming), found, options, held=held, read=read, moved=moved)

    def _check_batch(self, batch: Any, name: str) -> None:
        if message := difference(self._batch_specs, canonical(batch), name):
            raise ArgumentError(f"{message}: give parallelize the batch={{…}} that the loader yields")

    def _check_state(self, state: Any) -> None:
        if message := difference(self._state_specs, state, "state"):
            raise ArgumentError(f"{message}: pass a state that came from this step's init or update")
        if isinstance(state.step, jax.Array) and state.step.is_deleted():
            raise ArgumentError(
                "state was given up by an earlier update, and its memory is in use again: go on with the state that "
                "the update returned"
            )
