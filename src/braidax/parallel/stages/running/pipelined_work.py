"""What a step of stages computes: a first state, gradients, their norm, and the update, each where it lies."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.parallel.compute.accumulate import wide
from braidax.parallel.compute.state_form import load_tree, store_tree
from braidax.parallel.given.arrays import strong
from braidax.parallel.given.initial import Born
from braidax.parallel.given.optimizer import applied
from braidax.parallel.plan.layout import Layout
from braidax.parallel.plan.plan import follow
from braidax.parallel.state import State
from braidax.program import Program, named_leaves, specs_of, trace, with_leaves, without_leaves

from .everywhere import Everywhere
from .executor import Pipelined
from .feeding import Given
from .home import Home
from .owning.by_rows import check_by_rows
from .owning.divided_tree import DividedTree
from .placed_program import PlacedProgram
from .updating.stage_updates import StageUpdates


class Gradients(NamedTuple):
    """What a batch gives.

    **Fields:** `gradients`: a divided tree. `variables`: leaves of new ones. `metrics`: with the loss; those of one
    number on all devices. `loss`: with the first stage.
    """

    gradients: Any
    variables: list[Any]
    metrics: dict[str, Any]
    loss: Any


class Moved(NamedTuple):
    """What a batch makes of a state. **Fields:** `variables`: leaves. `metrics`: with the loss."""

    step: Any
    params: Any
    opt_state: Any
    variables: list[Any]
    metrics: dict[str, Any]


@final
class PipelinedWork:
    """Gradients of a pipeline, and an optimizer that moves each variable where it lies.

    By a schedule that flushes there are `gradients`, and then `apply`; by others both are `moved`.

    **Arguments:** `mesh`: of all stages. `born`: traced `key -> Born`. `wants_norm`: whether the global norm of
    gradients is a metric.

    **Raises:** `ArgumentError` for an optimizer that takes together what lies apart, other than by sums over all; where
    the schedule does not flush, also by these, and for the norm of all gradients.
    """

    def __init__(
        self,
        run: Pipelined,
        optimizer: optax.GradientTransformation,
        born: Program,
        mesh: Mesh,
        *,
        wants_norm: bool = False,
    ) -> None:
        self.run, self._optimizer, self._born = run, optimizer, born
        self.born: Born = born.out_specs
        params = born.out_specs.params
        self.tree = DividedTree(params, run.ownership)
        self._frozen = self._check(params)
        owned = enumerate(run.ownership.pieces)
        self._of_params = self.tree.of_pieces([[run.layouts[stage, one] for one in own] for stage, own in owned])
        self._divided = jax.eval_shape(self.tree.divide, params)
        moved, of_moved = self.trained(self._divided), self.trained(self._of_params)
        of_optimizer = jax.eval_shape(lambda params: strong(optimizer.init(params)), moved)
        self._of_state = follow(moved, of_moved, of_optimizer, lambda spec: Layout.whole(spec.shape))
        self.initial = trace(self._first, *born.in_specs)
        self.specs: State = self.initial.out_specs
        loss, self.updates = run.program.out_specs[0], None
        if run.schedule.is_flushed:
            self.update, of_state = self._placed(loss)
        else:
            self.updates, of_state = self._apart(wants_norm, loss)
        norm, lies = (
            trace(_norm, self.trained(self.specs.params)),
            self._lies([*jax.tree.leaves(of_moved)], self._trained_stages),
        )
        self.norm = PlacedProgram(norm, self._trained_stages, run.homes, lies=lies) if wants_norm else None
        places = [0, *self.tree.stages, *of_state, *(one.stage for one in run.carried), 0]
        self.homes = [run.homes[place] for place in places]
        """Of each leaf of a state."""
        self._places = places
        layouts = [*jax.tree.leaves((self._of_params, self._of_state))]
        lies = self._lies([None, *layouts], places)
        on = [lies.get(at, one.whole) for at, one in enumerate(self.homes)]
        self.shardings: State = jax.tree.unflatten(jax.tree.structure(self.specs), on)
        self._everywhere = Everywhere(mesh, run.homes)
        home = run.homes[0]
        self.step_key = home.compile(
            lambda key, step: jax.random.key_data(jax.random.fold_in(key, step)), (home.whole,) * 2, home.whole
        )
        self._next = home.compile(lambda step: step + 1, (home.whole,), home.whole)
        self._begin = [self._begun(stage) for stage in range(len(run.homes))]

    def begin(self, key: Any) -> State:
        """Makes a first state; each stage what it keeps."""
        found: list[Any] = [None] * len(self.homes)
        on = jax.tree.leaves(self.shardings)
        for home, (own, make) in zip(self.run.homes, self._begin, strict=True):
            if own:
                made = make(home.place([key], [home.whole])[0])
                # What does not depend on the key would be made on the first device of all.
                for at, value in zip(own, home.place(made, [on[at] for at in own]), strict=True):
                    found[at] = value
        return jax.tree.unflatten(jax.tree.structure(self.specs), found)

    def _begun(self, stage: int) -> tuple[list[int], Any]:
        own = [at for at, place in enumerate(self._places) if place == stage]
        home = self.run.homes[stage]

        def make(key: Any) -> list[Any]:
            leaves = jax.tree.leaves(self.initial(key))
            return [leaves[at] for at in own]

        on = jax.tree.leaves(self.shardings)
        return own, home.compile(make, (home.whole,), [on[at] for at in own])

    def gradients(self, state: State, batch: Sequence[Given]) -> Gradients:
        """Computes gradients. **Arguments:** `batch`: leaves."""
        key = self.step_key(state.key, state.step)
        pieces, variables = self.tree.pieces(state.params), jax.tree.leaves(state.variables)
        found = self.run.gradients(pieces, variables, key, batch)
        gradients = self.tree.of_pieces(found.gradients)
        norm = [] if self.norm is None else [self.norm(gradients)]
        metrics, at_first = self._metrics(found.results, norm)
        return Gradients(gradients, found.variables, metrics, at_first)

    def moved(self, state: State, batch: Sequence[Given], before_update: Callable[[], object] | None = None) -> Moved:
        """Computes a batch, and takes over the memory of the state's parameters and optimizer's state.

        **Arguments:** as of `Pipelined.updated`.
        """
        assert self.updates is not None, "there are updates of single stages"
        key = self.step_key(state.key, state.step)
        owned, variables = self.updates.owned(state.params, state.opt_state), jax.tree.leaves(state.variables)
        owned, variables, results = self.run.updated(
            owned, variables, key, batch, self.updates.stages, before_update=before_update
        )
        params, opt_state = self.updates.whole(owned)
        return Moved(self._next(state.step), params, opt_state, variables, self._metrics(results, [])[0])

    def _metrics(self, results: Sequence[Any], norm: Sequence[Any]) -> tuple[dict[str, Any], Any]:
        """Returns metrics by name, and the loss at the first home."""
        homes = self.run.result_homes
        if norm and self.norm is not None:
            homes.append(self.run.homes[self.norm.places[0]])
        (loss, *others), at_first = self.shown([*results, *norm], homes)
        _, (metrics, _) = self.run.program.out_specs
        shown = {"loss": loss, **jax.tree.unflatten(jax.tree.structure(metrics), others[: len(others) - len(norm)])}
        return shown | ({"grad_norm": others[-1]} if norm else {}), at_first

    def shown(self, results: Sequence[Any], homes: Sequence[Home]) -> tuple[list[Any], Any]:
        """Returns results, those of one number on all devices; and the first of these at the first home.

        **Arguments:** `homes`: where they lie.
        """
        scalars = [at for at, one in enumerate(results) if one.shape == ()]
        copies, at_first = self._everywhere([results[at] for at in scalars], [homes[at] for at in scalars])
        found = list(results)
        for at, copy in zip(scalars, copies, strict=True):
            found[at] = copy
        return found, at_first[0] if at_first else None

    def apply(self, state: State, gradients: Any, loss: Any) -> tuple[Any, Any, Any]:
        """Returns the next step, parameters and optimizer's state; takes over the memory of the old ones."""
        moved = self.trained(state.params)
        step, moved, opt_state = self.update(state.step, moved, state.opt_state, gradients, loss)
        return step, with_leaves(moved, state.params, self._frozen) if self._frozen else moved, opt_state

    def trained(self, tree: Any) -> Any:
        """Returns a divided tree with None in place of what is frozen."""
        return without_leaves(tree, self._frozen) if self._frozen else tree

    @property
    def _trained_stages(self) -> list[int]:
        """Of each leaf that is trained, which stage owns it."""
        pairs = zip(self.tree.leaves, self.tree.stages, strict=True)
        return [stage for leaf, stage in pairs if leaf not in self.run.frozen]

    def _check(self, params: Any) -> frozenset[str]:
        """Checks what the optimizer does with rows of what is trained.

        **Returns:** the names, in the divided tree, of what is not. **Raises:** `ArgumentError` as `check_by_rows`.
        """
        frozen, names = self.run.frozen, [name for name, _ in named_leaves(params)]
        still = {names[at] for at in frozen}
        moved = [at for at in range(len(names)) if at not in frozen]

        def divide(tree: Any) -> Any:
            zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), params)
            divided = self.tree.divide(with_leaves(tree, zeros, still) if still else tree)
            return without_leaves(divided, told) if told else divided

        specs = named_leaves(jax.eval_shape(self.tree.divide, params))
        told = frozenset(name for (name, _), leaf in zip(specs, self.tree.leaves, strict=True) if leaf in frozen)
        whole = without_leaves(params, still) if still else params
        check_by_rows(self._optimizer, whole, [moved.index(at) for at in self.tree.cut if at in moved], divide)
        return told

    # Traced

    def _first(self, key: Any) -> State:
        born = self._born(key)
        params = self.tree.divide(born.params)
        opt_state = strong(self._optimizer.init(self.trained(params)))
        whole = self.tree.whole_shapes(specs_of(params), specs_of(opt_state), self.trained)
        stored = {"params": (self._of_params, params), "opt_state": (self._of_state, opt_state)}
        layouts = [pair for name, (tree, _) in stored.items() for pair in named_leaves(tree, name)]
        padded = ((name, layout.shape) for name, layout in layouts if any(layout.padding))
        shapes = (*whole, *padded)
        params, opt_state = (store_tree(*one) for one in stored.values())
        return State(jnp.zeros((), jnp.int32), params, opt_state, born.variables, born.key, shapes=shapes)

    def _stepped(self, step: Any, params: Any, opt_state: Any, gradients: Any, loss: Any) -> Any:
        return step + 1, *self._applied(params, opt_state, gradients, loss)

    def _applied(self, params: Any, opt_state: Any, gradients: Any, loss: Any) -> Any:
        of_trained = self.trained(self._of_params)
        params, gradients = (load_tree(of_trained, one) for one in (params, gradients))
        params, opt_state = applied(self._optimizer, params, load_tree(self._of_state, opt_state), gradients, loss)
        return store_tree(of_trained, params), store_tree(self._of_state, opt_state)

    def whole_params(self, params: Any) -> Any:
        """Returns the parameters of a state as `init` makes them, on the host."""
        return self.tree.join(load_tree(self._of_params, jax.tree.map(jax.device_get, params)))

    def _lies(self, layouts: Sequence[Layout | None], places: Sequence[int | None]) -> dict[int, Any]:
        """Returns by number how values lie that are not whole. **Arguments:** `places`: the stages where they lie."""
        pairs = enumerate(zip(layouts, places, strict=False))
        return {at: self.run.homes[place or 0].lies(one) for at, (one, place) in pairs if one is not None and one.axes}

    def _known_places(self) -> list[int | None]:
        """Returns of each leaf of the optimizer's state the stage of the variable that it is of, if any."""
        trained = self.trained(self.specs.params)
        structure = jax.tree.structure(trained)
        known = follow(trained, structure.unflatten(self._trained_stages), self.specs.opt_state, lambda _: -1)
        return [None if place < 0 else place for place in jax.tree.leaves(known)]

    def _apart(self, wants_norm: bool, loss: Any) -> tuple[StageUpdates, Sequence[int]]:
        """Returns the updates of single stages, and where each leaf of the optimizer's state lies."""
        if wants_norm:
            raise ArgumentError(
                f"metrics has 'grad_norm', and by schedule {self.run.schedule.name!r} stages update at different "
                f"moments, so that there is no gradient of all: leave it out, or take a schedule that flushes"
            )
        specs = self.specs
        update = trace(self._applied, specs.params, specs.opt_state, specs.params, loss)
        layouts = [*jax.tree.leaves((self._of_params, self._of_state))]
        updates = StageUpdates(update, self.run, self.tree, self._known_places(), layouts)
        return updates, [place or 0 for place in updates.places]

    def _placed(self, loss: Any) -> tuple[PlacedProgram, Sequence[int]]:
        """Returns the update, and where each leaf of the optimizer's state lies: what is of a variable, with that."""
        specs, stages, trained = self.specs, self._trained_stages, self.trained(self.specs.params)
        update = trace(self._stepped, specs.step, trained, specs.opt_state, trained, loss)
        of_params, of_opt_state = (jax.tree.leaves(one) for one in (self.trained(self._of_params), self._of_state))
        layouts = [None, *of_params, *of_opt_state, *of_params]
        of_state = self._known_places()
        begin, count = 1 + len(stages), len(of_state)
        while True:
            places = [None, *stages, *of_state, *stages, None]
            kept = [(at, at) for at in range(1, begin + count)]
            placed = PlacedProgram(update, places, self.run.homes, kept=kept, lies=self._lies(layouts, places))
            got = placed.places[begin : begin + count]
            new = [there if place is None and there else place for place, there in zip(of_state, got, strict=True)]
            if new == of_state:
                return placed, [place or 0 for place in of_state]
            of_state = new


def _norm(gradients: Any) -> jax.Array:
    squares = [jnp.sum(jnp.square(wide(leaf))) for leaf in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
