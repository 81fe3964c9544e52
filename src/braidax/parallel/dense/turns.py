"""What a device does while the parts of some weights come by."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from braidax.parallel.plan.compiling import RingForm
from braidax.program import Division, RotatedUnit, aval_of, psum, psum_scatter

Axes = tuple[str, ...]

_MOST_UNROLLED = 3  # turns of short parts, all of which may be there at once


@dataclass(frozen=True)
class Turns:
    """Computes a unit on one device, in an island.

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

    def num(self, axes: Sequence[str]) -> int:
        """Returns how many devices lie along axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def stacked(self) -> list[int | None]:
        """Of each result, the dim of which parts give parts."""
        return [one.stacked for one in self.unit.results]

    @property
    def count(self) -> int:
        """How many devices the ring has."""
        return self.mesh.shape[self.axis]

    @property
    def num_turns(self) -> int:
        """How many parts, of those that are joined one, a device sees."""
        return self.count // self.unit.num_joined

    @property
    def _unroll(self) -> int:
        """How many turns one of a loop takes where parts are handed on in place."""
        turns = self.num_turns - 1
        if self.unit.num_joined > 1 and turns <= _MOST_UNROLLED:
            return turns
        return self.form.unroll if turns > _MOST_UNROLLED else 1  # a loop of one turn would be none

    def _divisions(self, step: Any, number: Any) -> tuple[Division, Division]:
        """Of the weights that a device has after some hops, in a slice of its part, and of the samples."""
        joined, home = self.unit.num_joined, jax.lax.axis_index(self.axis)
        index = ((home if joined == 1 else home // joined) + step) % self.num_turns
        batch = Division(self.num(self.batch_axes), jax.lax.axis_index(self.batch_axes), sums=False)
        return Division(self.count, index, self.unit.size, True, self.unit.num_slices, number, joined), batch

    def _hop(self, parts: Any) -> Any:
        """Hands what a device has to the one before it, or where parts are joined, to the one before those."""
        pairs = [(at, (at - self.unit.num_joined) % self.count) for at in range(self.count)]
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
        more = [-size % self.num([one for one in axes if one != self.axis]) for size, axes in sizes]
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
        return tuple(-(-size // self.count) if one == dim else size for one, size in enumerate(shape))

    def _args(self, inputs: Sequence[Any], parts: Mapping[int, Any]) -> list[Any]:
        return [parts.get(at, value) for at, value in enumerate(inputs)]

    def _slice(self, parts: Mapping[int, Any], number: Any) -> dict[int, Any]:
        """Returns a slice of the parts of all weights, or what is joined of them."""
        if self.unit.num_slices == 1:
            return self._joined(parts)
        return {at: jax.lax.dynamic_slice_in_dim(part, *self._where(at, number)) for at, part in parts.items()}

    def _joined(self, parts: Mapping[int, Any]) -> dict[int, Any]:
        """Brings parts of neighbors into one, twice as many with each message: the own first, or in their order."""
        found, distance = dict(parts), 1
        while distance < self.unit.num_joined:
            is_second, others = self._swapped(found, distance)
            for at, own in found.items():
                pair = self._ordered(is_second, own, others[at])
                found[at] = jnp.concatenate(pair, self.unit.weights[at].divided)
            distance *= 2
        return found

    def _own(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Sums the gradient of what is joined over those that have it, and leaves each that of its part."""
        found, distance = dict(gradients), self.unit.num_joined // 2
        while distance > 0:
            is_second = self._is_second(distance)
            halves = {
                at: self._ordered(is_second, *jnp.split(one, 2, self.unit.weights[at].divided))
                for at, one in found.items()
            }
            _, others = self._swapped({at: other for at, (_, other) in halves.items()}, distance)
            found = {at: own + others[at] for at, (own, _) in halves.items()}
            distance //= 2
        return found

    def _ordered(self, is_second: Any, one: Any, other: Any) -> tuple[Any, Any]:
        """Turns a pair around on the second of two devices, where it matters how parts lie."""
        if not self.unit.length.is_ordered:
            return one, other
        return jnp.where(is_second, other, one), jnp.where(is_second, one, other)

    def _swapped(self, values: Any, distance: int) -> tuple[Any, Any]:
        """Swaps values with a neighbor. **Returns:** whether this device is the second of the two; and the other's."""
        pairs = [(at, at ^ distance) for at in range(self.count)]
        return self._is_second(distance), jax.tree.map(lambda one: jax.lax.ppermute(one, self.axis, pairs), values)

    def _is_second(self, distance: int) -> Any:
        return jax.lax.axis_index(self.axis) & distance != 0

    def _where(self, at: int, number: Any) -> tuple[Any, int, int]:
        """Where a slice of a part of a weight starts, its size, and along which dim."""
        dim = self.unit.weights[at].divided
        size, (weights, _) = aval_of(self.unit.jaxpr.invars[at]).shape[dim], self._divisions(0, number)
        return weights.start_in_part(size), weights.part_size(size), dim

    def _slice_by_slice(self, turn: Callable[[Any, Any], Any], carried: Any) -> Any:
        if self.unit.num_slices == 1:
            return turn(0, carried)
        return jax.lax.fori_loop(0, self.unit.num_slices, turn, carried)

    def forward(self, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Returns the results, the maxima, and what is kept, turn by turn. **Arguments:** `inputs`: a device's own."""
        whole = {at: self._gathered(at, inputs[at]) for at in self.weights}

        def of_slice(number: Any, state: Any) -> Any:
            parts, last = self._slice(whole, number), self.num_turns - 1

            def add(step: Any, parts: Any, state: Any) -> Any:
                args, divisions = self._args(inputs, parts), self._divisions(step, number)
                products = zip(state[-1], self.unit.kept_of(args, *divisions), strict=True)
                kept = [jax.lax.dynamic_update_index_in_dim(all_, one, step, 0) for all_, one in products]
                return *self._add(divisions, args, state[:-1]), kept

            def ahead(step: Any, carried: Any) -> Any:
                parts, state = carried
                return self._hop(parts), add(step, parts, state)

            def in_place(step: Any, carried: Any) -> Any:
                parts, state = carried
                parts = self._hop(parts)
                return parts, add(step, parts, state)

            if self.form.in_place:
                begun = parts, add(0, parts, state)
                return jax.lax.fori_loop(1, last + 1, in_place, begun, unroll=self._unroll)[1]
            if last > 0:
                parts, state = jax.lax.fori_loop(0, last, ahead, (parts, state))
            return add(last, parts, state)

        args = self._args(inputs, self._slice(whole, 0))
        totals, maxima, kept = self._slice_by_slice(of_slice, self._nothing(args))
        of_tops = self.unit.of_maxima(args, *self._divisions(0, 0), maxima)[0] if self.unit.tops else {}
        outputs = [
            of_tops[at] if at in of_tops else total.astype(aval_of(var).dtype)
            for at, (total, var) in enumerate(zip(totals, self.unit.outputs, strict=True))
        ]
        return tuple(outputs), tuple(maxima), tuple(kept)

    def _nothing(self, args: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Sums of nothing, room for what parts give parts of, maxima of nothing, and room for what is kept."""
        divisions = self._divisions(0, 0)
        maxima = [
            jnp.full(one.shape, -jnp.inf, one.dtype)
            for one in jax.eval_shape(lambda: self.unit.maxima_of(args, *divisions) if self.unit.tops else [])
        ]
        totals: list[Any] = []
        of_part, num_parts = jax.eval_shape(lambda: self.unit.part(args, *divisions, maxima)), self._num_parts
        for one, dim in zip(of_part, self.stacked, strict=True):
            if one is None:
                totals.append(None)
            elif dim is None:
                totals.append(jnp.zeros(one.shape, _wide(one.dtype)))
            else:
                shape = [size * (num_parts if at == dim else 1) for at, size in enumerate(one.shape)]
                totals.append(jnp.zeros(shape, one.dtype))
        products = jax.eval_shape(lambda: self.unit.kept_of(args, *divisions))
        return totals, maxima, [jnp.zeros((self.num_turns, *one.shape), one.dtype) for one in products]

    def _add(self, divisions: tuple[Division, Division], args: Sequence[Any], state: Any) -> tuple[Any, Any]:
        """Adds what a part gives."""
        totals, maxima = state
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
        for total, one, dim in zip(totals, of_part, self.stacked, strict=True):
            if one is None or dim is None:
                found.append(None if one is None else total + one)
            else:
                start = self._start(divisions[0], one, dim)
                found.append(jax.lax.dynamic_update_slice_in_dim(total, one, start, dim))
        return found, maxima

    @property
    def _num_parts(self) -> int:
        return self.num_turns * self.unit.num_slices

    def _start(self, division: Division, part: Any, dim: int) -> Any:
        """Where a part of a result starts in the whole; a result in parts has slices of one size."""
        return (division.index * self.unit.num_slices + division.slice) * part.shape[dim]

    def backward(self, inputs: Any, backs: Any, maxima: Any, kept: Any, asked: Sequence[int]) -> list[Any]:
        """Returns gradients of the inputs that are asked for."""
        whole = {at: self._gathered(at, inputs[at]) for at in self.weights}
        moved = [at for at in asked if at in self.weights]
        fixed = [at for at in asked if at not in self.weights]

        def of_slice(number: Any, carried: Any) -> Any:
            found, total = carried

            def pulled(step: Any, parts: Any) -> Callable[[Any], tuple[dict[int, Any], dict[int, Any]]]:
                own, others = {at: parts[at] for at in moved}, {at: inputs[at] for at in fixed}
                args, products = self._args(inputs, parts), [one[step] for one in kept]
                return self._pulled(self._divisions(step, number), args, own, others, (maxima, products))

            gradients, more = self._gradients(pulled, self._slice(whole, number), backs)
            more = jax.tree.map(lambda one: one.astype(_wide(one.dtype)), more)
            if self.unit.num_slices == 1:
                return gradients, more
            return self._put(found, gradients, number), jax.tree.map(jnp.add, total, more)

        carried: Any = None, None
        if self.unit.num_slices > 1:
            zero, backs = jax.lax.optimization_barrier((jnp.zeros(()), backs))  # room is made when it is needed
            carried = (
                {at: jnp.full_like(whole[at], zero) for at in moved},
                {at: jnp.full_like(inputs[at], zero, _wide(inputs[at].dtype)) for at in fixed},
            )
        gradients, total = self._slice_by_slice(of_slice, carried)
        found: dict[int, Any] = {
            at: psum(one, self.batch_axes) if self.unit.batch[at] is None else one for at, one in total.items()
        }
        found |= {at: self._scattered(at, gradients[at]) for at in moved}
        # Whoever waits for one waits for all: the last hop has its work here, and what that needs is let go.
        found = {at: found[at].astype(inputs[at].dtype) for at in asked}
        is_free = self.is_last and self.form.lets_last_move  # what is sent later has its work there
        tied = [at for at in asked if not (is_free and at in moved)]
        found |= zip(tied, jax.lax.optimization_barrier([found[at] for at in tied]), strict=True)
        return [found[at] for at in asked]

    def _put(self, found: Any, gradients: Any, number: Any) -> dict[int, Any]:
        """Adds the gradients of a slice, which has none where it begins with the end of the slice before."""
        put: dict[int, Any] = {}
        for at, gradient in gradients.items():
            start, size, dim = self._where(at, number)
            there = jax.lax.dynamic_slice_in_dim(found[at], start, size, dim)
            put[at] = jax.lax.dynamic_update_slice_in_dim(found[at], there + gradient, start, dim)
        return put

    def _pulled(
        self, divisions: tuple[Division, Division], args: Sequence[Any], own: Any, others: Any, known: Any
    ) -> Callable[[Any], tuple[dict[int, Any], dict[int, Any]]]:
        """Returns what gives the gradients of a part, and of what is no weight, for what comes back."""

        def part(own: Any, others: Any) -> list[Any]:
            given = self._args(args, {**own, **others})
            return [one for one in self.unit.part(given, *divisions, *known) if one is not None]

        results, pull = jax.vjp(part, own, others)
        dims = [dim for at, dim in enumerate(self.stacked) if at not in self.unit.maxima.outputs]

        def of_backs(backs: Any) -> Any:
            told = [one for at, one in enumerate(backs) if at not in self.unit.maxima.outputs]
            each = zip(told, results, dims, strict=True)
            return pull([self._back(back, one, dim, divisions[0]) for back, one, dim in each])

        return of_backs

    def _gradients(self, pulled: Any, parts: Any, backs: Any) -> tuple[dict[int, Any], Any]:
        """Returns the gradient of the parts at home, and of what is no weight, of all parts."""
        home = pulled(0, parts)
        if self.count == 1:
            return home(backs)
        coming = parts if self.form.in_place else self._hop(parts)
        total = jax.tree.map(lambda one: one.astype(_wide(one.dtype)), home(backs)[1])
        # Barriers say under which work a hop is: the scheduler would put several in one place.
        coming, total = jax.lax.optimization_barrier((coming, total))
        others = self._others_in_place if self.form.in_place else self._others
        held, total = others(lambda *at: pulled(*at)(backs), coming, total)
        backs, held, total = jax.lax.optimization_barrier((backs, held, total))
        held = held if self.form.in_place else self._hop(held)
        return self._own(jax.tree.map(jnp.add, home(backs)[0], held)), total

    def _others_in_place(self, pulled: Any, parts: Any, total: Any) -> tuple[dict[int, Any], Any]:
        """Takes one part after another but that at home, and returns the gradient of this behind its last hop."""

        def loop(step: Any, carried: Any) -> Any:
            parts, held, total = carried
            parts = self._hop(parts)
            own, others = pulled(step, parts)
            held, total = (jax.tree.map(jnp.add, *pair) for pair in ((held, own), (total, others)))
            held, total = jax.lax.optimization_barrier((held, total))
            return parts, self._hop(held), total

        held = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), jax.eval_shape(pulled, 0, parts)[0])
        carried = parts, held, total
        _, held, total = jax.lax.fori_loop(1, self.num_turns, loop, carried, unroll=self._unroll)
        return held, total

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

        last = self.count - 1
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
        if more := size * self._num_parts - back.shape[dim]:
            back = jnp.pad(back, [(0, more if at == dim else 0) for at in range(back.ndim)])
        return jax.lax.dynamic_slice_in_dim(back, self._start(division, result, dim), size, dim)


def _wide(dtype: Any) -> Any:
    """The type that sums of many parts are taken in."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
