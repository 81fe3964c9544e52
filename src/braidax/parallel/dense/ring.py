"""A ring: each device computes its own samples with one part of some weights after another, as these go around.

A device begins with the part that is at home and hands on what it has, so that after N - 1 hops it has seen all; the
next part is on its way while this one is used. The backward pass begins at home again, computes what lies between
once more, and the sum of a part's gradient follows it from device to device: N - 1 hops for each of them. The gradient
of the part at home is made last, under the last hop. (RTP, arXiv 2311.01635, sends gradients when nothing is computed.)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, PartitionSpec

from braidax.parallel.plan.compiling import RingForm
from braidax.program import Division, RotatedUnit, aval_of, psum, psum_scatter

SAVED = "braidax_rotated"
"""The name of what a remat keeps of rings, so that it repeats no hop."""

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Ring:
    """Computes a unit on a mesh.

    **Fields:** `axis`: along which weights go around. `batch_axes`: over which samples are divided. `weights`: for each
    input of the unit that is one, the axes that split its dims; along others than `axis` it is gathered before.
    `form`: how it is written for the compiler. `is_last`: the backward pass begins with it.
    """

    unit: RotatedUnit
    axis: str
    batch_axes: Axes
    mesh: AbstractMesh
    weights: Mapping[int, tuple[Axes, ...]]
    form: RingForm
    is_last: bool

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the results of the unit, in the global view."""
        padded = [self._padded(at, value) if at in self.weights else value for at, value in enumerate(inputs)]
        outputs = [checkpoint_name(value, SAVED) for value in self._computed(*padded)]
        shapes = [aval_of(var).shape for var in self.unit.outputs]
        pairs = zip(outputs, shapes, strict=True)
        return [value if value.shape == shape else value[tuple(map(slice, shape))] for value, shape in pairs]

    def _computed(self, *inputs: Any) -> tuple[Any, ...]:
        @jax.custom_vjp
        def ring(*inputs: Any) -> Any:
            return self._island(self._forward, self._in_specs, self._out_specs)(*inputs)[0]

        def forward(*given: Any) -> Any:
            inputs = [one.value for one in given]
            outputs, maxima = self._island(self._forward, self._in_specs, self._out_specs)(*inputs)
            return outputs, (inputs, maxima, tuple(one.perturbed for one in given))

        def backward(kept: Any, backs: Any) -> Any:
            inputs, maxima, moving = kept
            outputs, _ = self._out_specs
            asked = [at for at, one in enumerate(moving) if one and _is_float(inputs[at])]
            like = [aval_of(var) for var in self.unit.outputs]
            pairs = zip(backs, self._shapes(like), like, strict=True)
            backs = [jnp.zeros(s, a.dtype) if isinstance(one, SymbolicZero) else one for one, s, a in pairs]
            in_specs = (self._in_specs, outputs, self._specs_of_maxima)

            def local(inputs: Any, backs: Any, maxima: Any) -> Any:
                return self._backward(inputs, backs, maxima, asked)

            specs = [self._in_specs[at] for at in asked]
            found = self._island(local, in_specs, specs)(tuple(inputs), tuple(backs), maxima)
            gradients = dict(zip(asked, found, strict=True))
            return tuple(gradients.get(at) for at in range(len(inputs)))

        ring.defvjp(forward, backward, symbolic_zeros=True)
        return ring(*inputs)

    def _shapes(self, like: Sequence[Any]) -> list[tuple[int, ...]]:
        """Of results, of which those that are put together may be padded."""
        shapes: list[tuple[int, ...]] = []
        for aval, dim in zip(like, self._stacked, strict=True):
            more = -aval.shape[dim] % self._count if dim is not None else 0
            shapes.append(tuple(size + (more if at == dim else 0) for at, size in enumerate(aval.shape)))
        return shapes

    # Where things lie

    @property
    def _in_specs(self) -> tuple[PartitionSpec, ...]:
        specs: list[PartitionSpec] = []
        for at, var in enumerate(self.unit.jaxpr.invars):
            if at in self.weights:
                specs.append(PartitionSpec(*(axes or None for axes in self.weights[at])))
            else:
                specs.append(self._along_batch(self.unit.batch[at], aval_of(var).ndim))
        return tuple(specs)

    @property
    def _out_specs(self) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
        """Of the results, and of the maxima."""
        outputs = zip(self.unit.results, self.unit.outputs, strict=True)
        return tuple(self._along_batch(one.batch, aval_of(var).ndim) for one, var in outputs), self._specs_of_maxima

    @property
    def _specs_of_maxima(self) -> tuple[PartitionSpec, ...]:
        dims = zip(self.unit.tops, self.unit.maxima.batch, strict=True)
        return tuple(self._along_batch(dim, aval_of(var).ndim) for var, dim in dims)

    def _along_batch(self, dim: int | None, ndim: int) -> PartitionSpec:
        return PartitionSpec(*(self.batch_axes if at == dim else None for at in range(ndim)))

    def _island(self, local: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        names = {*self.batch_axes, self.axis, *(one for dims in self.weights.values() for axes in dims for one in axes)}
        return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)

    def _padded(self, at: int, value: Any) -> Any:
        """Returns a weight whose dims its devices divide, where it is laid."""
        more = [-size % self._num(axes) for size, axes in zip(value.shape, self.weights[at], strict=True)]
        return jnp.pad(value, [(0, one) for one in more]) if any(more) else value

    def _num(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def _stacked(self) -> list[int | None]:
        """Of each result, the dim of which parts give parts."""
        return [one.stacked for one in self.unit.results]

    @property
    def _count(self) -> int:
        return self.mesh.shape[self.axis]

    # On a device

    def _divisions(self, step: Any) -> tuple[Division, Division]:
        """Of the weights that a device has after some hops, and of the samples."""
        index = (jax.lax.axis_index(self.axis) + step) % self._count
        batch = Division(self._num(self.batch_axes), jax.lax.axis_index(self.batch_axes), sums=False)
        return Division(self._count, index, self.unit.size), batch

    def _hop(self, parts: Any) -> Any:
        """Hands what a device has to the one before it."""
        pairs = [(at, (at - 1) % self._count) for at in range(self._count)]
        return jax.tree.map(lambda one: jax.lax.ppermute(one, self.axis, pairs), parts)

    def _gathered(self, at: int, value: Any) -> Any:
        """Returns a part of a weight, whole along the other axes that split it."""
        for dim, axes in enumerate(self.weights[at]):
            for axis in reversed(axes):
                if axis != self.axis:
                    value = jax.lax.all_gather(value, axis, axis=dim, tiled=True)
        return self._as_it_is(value[tuple(slice(size) for size in self._part_shape(at))])

    def _as_it_is(self, part: Any) -> Any:
        """Multiplies a part by a 1 that no compiler knows, if it would else be copied with those of all layers."""
        if not self.form.keeps_wide or part.dtype != jnp.float32:
            return part
        return part * jnp.where(jax.lax.axis_index(self.axis) < 0, 0, 1).astype(part.dtype)

    def _scattered(self, at: int, gradient: Any) -> Any:
        """Sums the gradient of a part over all other devices, and leaves each what it has of the weight."""
        here = {axis for axes in self.weights[at] for axis in axes}
        sizes = zip(self._part_shape(at), self.weights[at], strict=True)
        more = [-size % self._num([one for one in axes if one != self.axis]) for size, axes in sizes]
        gradient = jnp.pad(gradient, [(0, one) for one in more]) if any(more) else gradient
        for dim, axes in enumerate(self.weights[at]):
            for axis in axes:
                if axis != self.axis and axis in self.batch_axes:
                    gradient = psum_scatter(gradient, axis, dim=dim)
        others = tuple(axis for axis in self.batch_axes if axis not in here)
        return psum(gradient, others) if others else gradient

    def _part_shape(self, at: int) -> tuple[int, ...]:
        """Of a part of a weight that is whole along other axes."""
        shape, dim = aval_of(self.unit.jaxpr.invars[at]).shape, self.unit.weights[at].divided
        return tuple(-(-size // self._count) if one == dim else size for one, size in enumerate(shape))

    def _args(self, inputs: Sequence[Any], parts: Mapping[int, Any]) -> list[Any]:
        return [parts.get(at, value) for at, value in enumerate(inputs)]

    def _forward(self, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        parts = {at: self._gathered(at, inputs[at]) for at in self.weights}
        state = self._nothing(inputs, parts)

        def turn(step: Any, carried: Any) -> Any:
            parts, state = carried
            return self._hop(parts), self._add(step, inputs, parts, state)

        if self._count > 1:
            parts, state = jax.lax.fori_loop(0, self._count - 1, turn, (parts, state))
        totals, maxima = self._add(self._count - 1, inputs, parts, state)
        of_tops = self._of_maxima(self._count - 1, inputs, parts, maxima)[0]
        shapes = self.unit.outputs
        outputs = [
            of_tops[at] if at in of_tops else total.astype(aval_of(var).dtype)
            for at, (total, var) in enumerate(zip(totals, shapes, strict=True))
        ]
        return tuple(outputs), tuple(maxima)

    def _nothing(self, inputs: Sequence[Any], parts: Any) -> tuple[list[Any], list[Any]]:
        """Sums of nothing, room for what parts give parts of, and maxima of nothing."""
        args = self._args(inputs, parts)
        divisions = self._divisions(0)
        maxima = [
            jnp.full(one.shape, -jnp.inf, one.dtype)
            for one in jax.eval_shape(lambda: self.unit.maxima_of(args, *divisions) if self.unit.tops else [])
        ]
        totals: list[Any] = []
        for one, dim in zip(
            jax.eval_shape(lambda: self.unit.part(args, *divisions, maxima)), self._stacked, strict=True
        ):
            if one is None:
                totals.append(None)
            elif dim is None:
                totals.append(jnp.zeros(one.shape, _wide(one.dtype)))
            else:
                shape = [size * (self._count if at == dim else 1) for at, size in enumerate(one.shape)]
                totals.append(jnp.zeros(shape, one.dtype))
        return totals, maxima

    def _add(self, step: Any, inputs: Sequence[Any], parts: Any, state: Any) -> tuple[list[Any], list[Any]]:
        """Adds what a part gives."""
        totals, maxima = state
        args, divisions = self._args(inputs, parts), self._divisions(step)
        before = maxima
        if self.unit.tops:
            maxima = [jnp.maximum(*pair) for pair in zip(before, self.unit.maxima_of(args, *divisions), strict=True)]
            was, now = (self.unit.of_maxima(args, *divisions, some)[1] for some in (before, maxima))
            totals = [
                jnp.where(total == 0, 0, total * jnp.exp(was[at] - now[at])) if at in now else total
                for at, total in enumerate(totals)
            ]
        found: list[Any] = []
        of_part = self.unit.part(args, *divisions, maxima)
        for total, one, dim in zip(totals, of_part, self._stacked, strict=True):
            if one is None or dim is None:
                found.append(None if one is None else total + one)
            else:
                start = divisions[0].index * one.shape[dim]
                found.append(jax.lax.dynamic_update_slice_in_dim(total, one, start, dim))
        return found, maxima

    def _of_maxima(self, step: Any, inputs: Sequence[Any], parts: Any, maxima: Sequence[Any]) -> Any:
        if not self.unit.tops:
            return {}, {}
        return self.unit.of_maxima(self._args(inputs, parts), *self._divisions(step), maxima)

    def _backward(self, inputs: Any, backs: Any, maxima: Any, asked: Sequence[int]) -> list[Any]:
        """Returns gradients of the inputs that are asked for."""
        parts = {at: self._gathered(at, inputs[at]) for at in self.weights}
        moved = [at for at in asked if at in self.weights]
        fixed = [at for at in asked if at not in self.weights]

        def pulled(step: Any, parts: Any) -> Callable[[Any], tuple[dict[int, Any], dict[int, Any]]]:
            """Returns what gives the gradients of a part, and of what is no weight, for what comes back."""
            divisions = self._divisions(step)

            def part(own: Any, others: Any) -> list[Any]:
                args = self._args(inputs, {**parts, **own, **others})
                return [one for one in self.unit.part(args, *divisions, maxima) if one is not None]

            own, others = {at: parts[at] for at in moved}, {at: inputs[at] for at in fixed}
            results, pull = jax.vjp(part, own, others)
            dims = [dim for at, dim in enumerate(self._stacked) if at not in self.unit.maxima.outputs]

            def of_backs(backs: Any) -> Any:
                told = [one for at, one in enumerate(backs) if at not in self.unit.maxima.outputs]
                each = zip(told, results, dims, strict=True)
                return pull([self._back(back, one, dim, divisions[0]) for back, one, dim in each])

            return of_backs

        home = pulled(0, parts)
        coming = self._hop(parts) if self._count > 1 else parts
        total = jax.tree.map(lambda one: one.astype(_wide(one.dtype)), home(backs)[1])
        held: Any = {}
        if self._count > 1:  # barriers say under which work a hop is: the scheduler would put several in one place
            coming, total = jax.lax.optimization_barrier((coming, total))
            held, total = self._others(lambda *at: pulled(*at)(backs), coming, total)
            backs, held, total = jax.lax.optimization_barrier((backs, held, total))
            held = self._hop(held)
        gradients = home(backs)[0]
        found: dict[int, Any] = {
            at: psum(one, self.batch_axes) if self.unit.batch[at] is None else one for at, one in total.items()
        }
        for at in moved:
            gradient = gradients[at] + held[at] if held else gradients[at]
            found[at] = self._scattered(at, gradient)
        # Whoever waits for one waits for all: the last hop has its work here, and what that needs is let go.
        found = {at: found[at].astype(inputs[at].dtype) for at in asked}
        is_free = self.is_last and self.form.lets_last_move  # what is sent later has its work there
        tied = [at for at in asked if not (is_free and at in moved)]
        found |= zip(tied, jax.lax.optimization_barrier([found[at] for at in tied]), strict=True)
        return [found[at] for at in asked]

    def _others(self, pulled: Any, parts: Any, total: Any) -> tuple[dict[int, Any], Any]:
        """Takes one part after another but that at home, and returns the gradient of this before its last hop."""

        def turn(step: Any, parts: Any, held: Any, total: Any) -> tuple[Any, Any]:
            arrived = None if held is None else self._hop(held)
            own, others = pulled(step, parts)
            total = jax.tree.map(lambda one, more: one + more, total, others)
            return own if arrived is None else jax.tree.map(jnp.add, arrived, own), total

        def loop(step: Any, carried: Any) -> Any:
            parts, held, total = carried
            return self._hop(parts), *turn(step, parts, held, total)

        last = self._count - 1
        if last > 1:
            coming = self._hop(parts)
            held, total = turn(1, parts, None, total)
            carried = jax.lax.optimization_barrier((coming, held, total))
            parts, held, total = jax.lax.fori_loop(2, last, loop, carried, unroll=self.form.unroll)
            held, total = turn(last, parts, held, total)
        else:
            held, total = turn(1, parts, None, total)
        return held, total

    def _back(self, back: Any, result: Any, dim: int | None, division: Division) -> Any:
        """Returns what comes back for the result of a part."""
        if dim is None:
            return back.astype(result.dtype)
        size = result.shape[dim]
        if more := size * self._count - back.shape[dim]:
            back = jnp.pad(back, [(0, more if at == dim else 0) for at in range(back.ndim)])
        return jax.lax.dynamic_slice_in_dim(back, division.index * size, size, dim)


def _wide(dtype: Any) -> Any:
    """The type that sums of many parts are taken in."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)
