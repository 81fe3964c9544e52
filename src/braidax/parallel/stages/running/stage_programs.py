"""The compiled programs of a stage."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp

from braidax.parallel.compute.accumulate import wide, wide_zeros
from braidax.parallel.plan.layout import Layout
from braidax.parallel.stages.halved import Halved
from braidax.parallel.stages.passes import Passes, is_float
from braidax.program import Stage, batch_dims_of_results, trace
from braidax.program.halving.loop_sums import adding_in_loops
from braidax.program.halving.turned import made_by_products
from braidax.program.putting_off.parts import left_in_parts

from .flat import Flat
from .forward_backward import ForwardBackward
from .home import Home
from .owning.ownership import Piece, Read
from .sending.absent import absent
from .stage_halves import Buffers, StageHalves

PARAMS, VARIABLES, KEY, BATCH = range(4)
"""The arguments of a traced loss."""


class Ran(NamedTuple):
    """What a forward pass gives: `outgoing` values, `results` of the loss, and what is `kept` for the way back."""

    outgoing: tuple[Any, ...]
    results: tuple[Any, ...]
    kept: tuple[Any, ...]


@final
class StagePrograms:
    """What a stage computes, as jitted functions on its home; each is compiled at its first call.

    `forward(params, given, incoming) -> Ran`. `backward(sums, moved, others, params, given, kept, gradients) -> (sums,
    gradients of what came in)` takes over the memory of the sums and of `moved`, what came in
    and has gradients; `inputs` and `weights` are its halves. `zeros() -> sums`. What is frozen has no gradient.

    **Arguments:** `reads`: what pieces of parameters its program reads. `pieces`: their specs, and `layouts` of those
    that do not lie whole. `incoming_dims`: of incoming values, which goes along the samples. `recompute`: whether
    nothing is kept for the way back. `turn_weights`: whether weights that products take turned are turned once, for all
    microbatches of a batch.
    """

    def __init__(
        self,
        stage: Stage,
        home: Home,
        reads: Sequence[Read],
        pieces: Any,
        incoming_dims: Sequence[int | None],
        *,
        layouts: Mapping[tuple[int, Piece], Layout],
        recompute: bool = False,
        turn_weights: bool = False,
    ) -> None:
        self.stage, self.home, self.reads = stage, home, tuple(reads)
        self._passes = passes = Passes(
            stage,
            params=PARAMS,
            recompute=recompute,
            turn_weights=turn_weights,
            hold_values=home.is_one_cpu,
            mesh=home.traced_on,
        )
        self.products, self.turns, self.forward_turns = passes.products, bool(passes.turned), passes.forward_turns
        """Options for products; whether a backward pass is given turned weights behind `params`, a forward pass too."""
        self.read_pieces = tuple(dict.fromkeys((one.owner, one.piece) for one in reads))
        self._layouts = [layouts.get(one, Layout.whole(pieces[one].shape)) for one in self.read_pieces]
        self.flat, self.flat_on = self._buffers([pieces[one] for one in self.read_pieces], self._layouts)
        in_flat = jax.tree.leaves(stage.program.in_specs)
        self.trained_reads = tuple(self.reads[at] for at in self._passes.trained)
        self.specs = [in_flat[at] for at in self._passes.trained]
        places = dict(zip(self.read_pieces, self._layouts, strict=True))
        pairs = zip(self.trained_reads, self.specs, strict=True)
        self._read_layouts = [places[at[:2]] if at.rows is None else Layout.whole(one.shape) for at, one in pairs]
        held = self._passes.held
        self._floats = [at for at, one in enumerate(stage.incoming) if is_float(one)]
        self._moved = [at for at in held if at in self._floats]
        self._others = [at for at in held if at not in self._floats]
        self._dims(incoming_dims)
        self._differentiate(incoming_dims)
        self._compile()

    def _buffers(
        self,
        specs: Sequence[Any],
        layouts: Sequence[Layout],
        in_parts: Collection[int] = (),
        turned: Collection[int] = (),
    ) -> tuple[Flat, list[Any]]:
        """Returns the buffers of arrays as they are stored, and how these lie.

        **Arguments:** `in_parts`: which are, one part a device. `turned`: which lie turned.
        """
        stored = [stored_spec(*pair) for pair in zip(specs, layouts, strict=True)]
        on = [self.home.lies(one) for one in layouts]
        for at in in_parts:
            stored[at] = jax.ShapeDtypeStruct((self.home.num_parts, *stored[at].shape), stored[at].dtype)
            on[at] = self.home.lies(layouts[at], in_parts=True)
        dims = [0 if at in in_parts else None for at in range(len(stored))]
        flat = Flat(stored, dims=dims, apart=[at for at, one in enumerate(layouts) if one.axes], turned=turned)
        return flat, flat.of_buffers(on, self.home.along)

    def _dims(self, incoming_dims: Sequence[int | None]) -> None:
        """Finds how values lie."""
        home, stage = self.home, self.stage
        given = [leaf for leaf in stage.leaves if leaf.argument != PARAMS]
        self._incoming_dims = list(incoming_dims)
        self._given_dims = dims_of_given = [0 if leaf.argument == BATCH else None for leaf in given]
        specs = jax.tree.leaves(stage.program.in_specs[:-1])[len(self.reads) :]
        self.given_leaves, self.given_specs = given, specs
        self.given_shardings = tuple(home.along(s.shape, dim) for s, dim in zip(specs, dims_of_given, strict=True))
        pairs = zip(stage.incoming, incoming_dims, strict=True)
        self.incoming_shardings = tuple(home.along(spec.shape, dim) for spec, dim in pairs)
        kept = self._passes.kept
        self._kept = Flat(kept, small_bytes=0)
        divided = {1: dims_of_given, 2: list(incoming_dims)}
        traced = trace(self._forward, self.params_specs, tuple(specs), stage.incoming, mesh=home.traced_on)
        made: Ran = traced.out_specs
        dims = batch_dims_of_results(traced, divided, islands=True)
        if kept:  # from here on in buffers
            before = len(dims) - len(kept)
            of_kept = dims[before:] if home.is_divided else None
            self._kept = Flat(kept, dims=of_kept, longer=self._halved.left.kept)
            made = made._replace(kept=tuple(jax.eval_shape(self._kept.pack, list(kept))))
            dims = [*dims[:before], *self._kept.dims]
        self.ran_specs = made
        on = [home.along(spec.shape, dim) for spec, dim in zip(jax.tree.leaves(made), dims, strict=True)]
        self.ran_shardings: Ran = jax.tree.unflatten(jax.tree.structure(made), on)
        self.absent_results = () if home.is_here else jax.tree.map(absent, made.results, self.ran_shardings.results)
        """What the results of a forward pass are for a process that has no device of the stage."""
        self.outgoing_dims = dims[: len(made.outgoing)]
        self.float_outgoing = [at for at, one in enumerate(made.outgoing) if is_float(one)]
        self.gradient_shardings = tuple(self.ran_shardings.outgoing[at] for at in self.float_outgoing)

    def _differentiate(self, incoming_dims: Sequence[int | None]) -> None:
        """Traces the backward pass, which leaves gradients in parts that would be summed over devices."""
        home, stage, outgoing = self.home, self.stage, self.ran_specs.outgoing
        values = [tuple(stage.incoming[at] for at in which) for which in (self._moved, self._others)]
        gradients = tuple(outgoing[at] for at in self.float_outgoing)
        given = (*values, self.params_specs, tuple(self.given_specs), self.ran_specs.kept, gradients)
        program = trace(self._gradients, *given, mesh=home.traced_on)
        dims = [[incoming_dims[at] for at in which] for which in (self._moved, self._others)]
        of_gradients = [self.outgoing_dims[at] for at in self.float_outgoing]
        divided = {0: dims[0], 1: dims[1], 3: self._given_dims, 4: self._kept.dims, 5: of_gradients}
        whole = [at for at, one in enumerate(self._read_layouts) if not one.axes & {*home.batch_axes}]
        self._pulled, self.in_parts = program, tuple[int, ...]()
        if home.num_parts > 1 and whole:
            self._pulled, self.in_parts = left_in_parts(program, whole, divided, home.traced_on, home.batch_axes)
        specs = [_wide_spec(spec) for spec in self.specs]
        # XLA for CPUs makes gradients of long weights half as fast as turned ones; a sum is turned back once an update.
        long = [at for at, one in enumerate(specs) if len(one.shape) == 2 and one.shape[0] > one.shape[1]]
        made = made_by_products(program.closed.jaxpr, long) if home.is_one_cpu else ()
        self.sums, self.sums_on = self._buffers(specs, self._read_layouts, self.in_parts, made)

    @property
    def flat_specs(self) -> list[Any]:
        """Of the buffers of parameters."""
        return jax.eval_shape(self.flat.pack, list(self.flat.specs))

    @property
    def params_specs(self) -> list[Any]:
        """Of these and of turned weights."""
        return [*self.flat_specs, *jax.eval_shape(self._turn, self.flat_specs)]

    def _compile(self) -> None:
        home, whole, of_sums, products = self.home, self.flat_on, self.sums_on, self.products
        moved = tuple(self.incoming_shardings[at] for at in self._moved)
        sent = self.sent_shardings
        others = tuple(self.incoming_shardings[at] for at in self._others)
        params = self.params_on
        ins = (of_sums, moved, others, params, self.given_shardings, self.ran_shardings.kept, self.gradient_shardings)
        forward_ins = (params if self.forward_turns else whole, self.given_shardings, self.incoming_shardings)
        self.forward = home.compile(self._forward, forward_ins, self.ran_shardings, products=products)
        backward = adding_in_loops(self._backward, mesh=home.traced_on)
        self.backward = home.compile(backward, ins, (of_sums, sent), donate=(0, 1), products=products)
        self.turn = home.compile(self._turn, (whole,), home.whole)
        self.zeros = home.compile(self.no_sums, (), of_sums)
        self.joined = home.compile(self.flat.joined, (home.whole,), home.whole)

    @property
    def params_on(self) -> list[Any]:
        """How buffers of parameters and turned weights lie."""
        return [*self.flat_on, *[self.home.whole] * len(self._passes.turned)]

    def parted(self, incoming: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns those of incoming values that the way back needs: of floats, and others."""
        return tuple(incoming[at] for at in self._moved), tuple(incoming[at] for at in self._others)

    @property
    def sent_shardings(self) -> tuple[Any, ...]:
        """Of the gradients that go back."""
        return tuple(self.incoming_shardings[at] for at in self._floats)

    @property
    def sends_back(self) -> bool:
        """Whether anything that came in has a gradient."""
        return bool(self._floats)

    @cached_property
    def _halved(self) -> Halved:
        return Halved(self._passes, mesh=self.home.traced_on)

    @cached_property
    def halves(self) -> StageHalves:
        """The halves of the backward pass, of a stage that sends something back."""
        gradients = [self.stage.outgoing[at] for at in self.float_outgoing]
        dims = [self.outgoing_dims[at] for at in self.float_outgoing]
        buffers = self._buffers_of(
            self._kept, self._moved, self._others, self.ran_shardings.kept, gradients, dims, self.gradient_shardings
        )
        return StageHalves(self._halved, self.home, buffers, self.sent_shardings)

    @cached_property
    def forward_backward(self) -> ForwardBackward:
        """Both passes at once, of a stage that sends nothing on."""
        others = [at for at in range(len(self.stage.incoming)) if at not in self._floats]
        buffers = self._buffers_of(Flat([]), self._floats, others)
        on = self.sent_shardings, self.ran_shardings.results
        return ForwardBackward(self._passes, self.home, buffers, *on)

    def _buffers_of(
        self,
        form: Flat,
        moved: Sequence[int],
        others: Sequence[int],
        on_kept: Sequence[Any] = (),
        gradients: Sequence[Any] = (),
        dims_of_gradients: Sequence[int | None] = (),
        on_gradients: Sequence[Any] = (),
    ) -> Buffers:
        """Returns how the stage has what a pass is given. **Arguments:** `form`: of what is kept."""
        kept = jax.eval_shape(form.pack, list(form.specs))
        dims = self._given_dims, self._incoming_dims, form.dims, dims_of_gradients
        shardings = self.given_shardings, self.incoming_shardings, on_kept, on_gradients
        return Buffers(
            self._taken, self._stored, self._added, self.params_specs, self.given_specs, self.stage.incoming, kept,
            gradients, form, moved, others, dims, shardings, self.params_on, self.sums_on, self.in_parts, self.products,
        )  # fmt: skip

    def inputs(
        self,
        moved: Sequence[Any],
        others: Sequence[Any],
        params: Sequence[Any],
        given: Sequence[Any],
        kept: Sequence[Any],
        gradients: Sequence[Any],
    ) -> tuple[Sequence[Any], Any]:
        """Goes back to what came in; takes over the memory of `moved` where that is not held on.

        **Returns:** the gradients that are sent, and what is to be held for `weights`. Where nothing has come in, the
        whole way back is left to that.
        """
        if not self.sends_back:
            return (), (moved, others, kept, gradients)
        _, sent, left = self.halves.inputs(moved, others, params, given, kept, gradients)
        return sent, left

    def weights(self, sums: Sequence[Any], left: Any, params: Sequence[Any], given: Sequence[Any]) -> Any:
        """Returns the sums, in their memory, with what a microbatch adds. **Arguments:** `left`: by `inputs`."""
        if not self.sends_back:
            moved, others, kept, gradients = left
            return self.backward(sums, moved, others, params, given, kept, gradients)[0]
        return self.halves.weights(sums, left, params, given)

    # What is compiled

    def _forward(self, params: Sequence[Any], given: Sequence[Any], incoming: Sequence[Any]) -> Ran:
        made = self._passes.forward(self._taken(params, given), incoming)
        # What only passes would be the very array that came in, which the way back gives up while it is being sent.
        inputs = {id(one) for one in (*given, *incoming)}
        outgoing = [jnp.copy(one) if id(one) in inputs else one for one in made.outgoing]
        return Ran(tuple(outgoing), tuple(made.results), tuple(self._kept.pack(made.kept)))

    def _backward(
        self,
        sums: Sequence[Any],
        moved: Sequence[Any],
        others: Sequence[Any],
        params: Sequence[Any],
        given: Sequence[Any],
        kept: Sequence[Any],
        gradients: Sequence[Any],
    ) -> tuple[list[Any], tuple[Any, ...]]:
        own, sent = self._pulled(moved, others, params, given, kept, gradients)
        return self._added(sums, own), sent

    def _gradients(
        self,
        moved: Sequence[Any],
        others: Sequence[Any],
        params: Sequence[Any],
        given: Sequence[Any],
        kept: Sequence[Any],
        gradients: Sequence[Any],
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Returns the gradients of what is read, as it is stored, and of what came in."""
        held = dict(zip((*self._moved, *self._others), (*moved, *others), strict=True))
        incoming = [held.get(at, jnp.zeros(one.shape, one.dtype)) for at, one in enumerate(self.stage.incoming)]
        taken, kept = self._taken(params, given), self._kept.unpack(kept)
        _, sent, own = self._halved.backward(taken, incoming, kept, gradients)
        return self._stored(own), tuple(sent)

    def totals(self, sums: Sequence[Any]) -> list[Any]:
        """Returns the sums of what is read, over microbatches and devices, from buffers."""
        pairs = zip(sums, self.sums.dims, strict=True)
        return self.sums.unpack([one if dim is None else one.sum(dim) for one, dim in pairs], summed=True)

    def _stored(self, gradients: Any) -> list[Any]:
        pairs = zip(self._read_layouts, jax.tree.leaves(gradients), strict=True)
        return [layout.store(leaf) for layout, leaf in pairs]

    def _added(self, sums: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        return self.sums.added(sums, [wide(leaf) for leaf in gradients])

    def _taken(self, params: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what the stage has of the arguments of the loss, and turned weights.

        **Arguments:** `params`: buffers, and perhaps turned weights.
        """
        leaves, turned = self._leaves(params), list(params[len(self.flat.dims) :])
        structure = jax.tree.structure(self.stage.program.in_specs[:-1])
        return (*jax.tree.unflatten(structure, [*leaves, *given]), turned or self._passes.turn(leaves))

    def _turn(self, params: Sequence[Any]) -> list[Any]:
        """Returns turned weights. **Arguments:** `params`: buffers."""
        return self._passes.turn(self._leaves(params))

    def _leaves(self, params: Sequence[Any]) -> list[Any]:
        """Returns what is read of parameters. **Arguments:** `params`: buffers, and perhaps turned weights."""
        params = params[: len(self.flat.dims)]
        pairs = zip(self._layouts, self.flat.unpack(params), strict=True)
        found = dict(zip(self.read_pieces, [layout.load(one) for layout, one in pairs], strict=True))
        leaves: list[Any] = []
        for one in self.reads:
            piece = found[one.owner, one.piece]
            leaves.append(piece if one.rows is None else piece[slice(*one.rows)])
        return leaves

    def no_sums(self) -> list[Any]:
        """Returns sums of nothing; traced."""
        return self.sums.pack([wide_zeros(spec) for spec in self.sums.specs])


def stored_spec(spec: Any, layout: Layout) -> jax.ShapeDtypeStruct:
    """Returns the spec of the stored form of an array."""
    shape = [size + more for size, more in zip(spec.shape, layout.padding, strict=True)]
    return jax.ShapeDtypeStruct(tuple(shape), spec.dtype)


def _wide_spec(spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, jnp.promote_types(spec.dtype, jnp.float32))
