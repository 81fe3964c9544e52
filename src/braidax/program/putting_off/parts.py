"""A program some of whose results are left as parts of sums over samples, one part a device.

XLA's partitioner sums a gradient over devices wherever it is made. Here the operations that sum over samples, products
for weights above all, are islands in which each device sums its own; what carries the sum on from there is linear, and
is computed of each part.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core import Literal as Constant
from jax.extend.core.primitives import closed_call_p, jit_p, remat_p, scan_p, scatter_add_p
from jax.sharding import AbstractMesh, PartitionSpec

from braidax.program.batch_dims import find_batch_dims
from braidax.program.bodies import Path, bind, bodies, equations_of
from braidax.program.trace import Program, trace

from .linear import linear_in, summed_along

_ENTERED = (jit_p, closed_call_p, remat_p, scan_p)
Numbers = frozenset[int]


class InParts(NamedTuple):
    """**Fields:** `program`; `outputs`: which of its results are `[N, ...]`, one part a device."""

    program: Program
    outputs: tuple[int, ...]


class _Way(NamedTuple):
    """How an equation is computed.

    **Fields:** `whole`, `parts`: which results. `summed`: along which dims of operands, `linear`: in which operands. Of
    what is entered, which inputs of its body are `given` whole, and in parts, and which of a loop are `carried`.
    """

    kind: Literal["plain", "summed", "linear", "entered"]
    whole: Numbers
    parts: Numbers
    summed: tuple[int | None, ...] = ()
    linear: tuple[int, ...] = ()
    given: tuple[Numbers, Numbers] = (frozenset(), frozenset())
    carried: tuple[Numbers, Numbers] = (frozenset(), frozenset())


class _Again(Exception):
    """A loop needs as a whole what was to be carried in parts."""


def left_in_parts(
    program: Program,
    outputs: Sequence[int],
    divided: Mapping[int, Sequence[int | None] | int],
    mesh: AbstractMesh,
    batch_axes: tuple[str, ...],
    *,
    every: bool = False,
) -> InParts:
    """Returns a program that leaves some results in parts, those of the outputs that are sums over samples.

    **Arguments:** `outputs`: which may be, by number. `divided`: as of `find_batch_dims`. `mesh`: with automatic axes.
    `batch_axes`: over which samples are divided. `every`: whether all outputs are, of which the first device has what
    is no sum.
    """
    made, closed = _Parts(program, divided, mesh, batch_axes), program.closed
    while True:
        try:
            sums = made.find(closed.jaxpr, (), [False] * len(closed.jaxpr.invars))
            parts = tuple(at for at in outputs if every or sums[at])
            whole = frozenset(range(len(sums))) - {*parts}
            made.need(closed.jaxpr, (), whole, frozenset(parts))
            break
        except _Again:
            continue
    if not parts:
        return InParts(program, ())

    def run(*args: Any) -> Any:
        given = dict(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))
        wholes, in_parts = made.run(closed.jaxpr, closed.consts, (), given, {}, (whole, frozenset(parts)))
        results = [in_parts[at] if at in in_parts else wholes[at] for at in range(len(sums))]
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), results)

    return InParts(trace(run, *program.in_specs, mesh=mesh), parts)


class _Parts:
    """Finds sums over samples in a jaxpr, and computes them in parts."""

    def __init__(
        self, program: Program, divided: Mapping[int, Any], mesh: AbstractMesh, batch_axes: tuple[str, ...]
    ) -> None:
        paths = [path for path, _ in equations_of(program.closed.jaxpr)]
        self._dims = find_batch_dims(program, paths, divided)
        self._axes, self._count = batch_axes, prod(mesh.shape[axis] for axis in batch_axes)
        self._sums: dict[Path, dict[Any, bool]] = {}
        self._ways: dict[Path, _Way] = {}
        self._blocked: set[tuple[Path, int]] = set()

    # What is a sum

    def find(self, jaxpr: Jaxpr, path: Path, given: Sequence[bool]) -> list[bool]:
        """Returns which results are sums over samples. **Arguments:** `given`: which inputs are."""
        known = self._sums[path] = dict(zip(jaxpr.invars, given, strict=True))
        for at, equation in enumerate(jaxpr.eqns):
            operands = [_known(known, atom) for atom in equation.invars]
            known.update(zip(equation.outvars, self._found(equation, (*path, at), operands), strict=True))
        return [_known(known, atom) for atom in jaxpr.outvars]

    def _found(self, equation: JaxprEqn, here: Path, operands: list[bool]) -> list[bool]:
        if equation.primitive not in _ENTERED or not (inner := bodies(equation)):
            is_sum = bool(self._summed(equation, here)) or bool(linear_in(equation, operands))
            return [is_sum] * len(equation.outvars)
        given = [operands[at] for at in inner[0].operands]
        if equation.primitive is not scan_p:
            return self.find(inner[0].jaxpr, (*here, 0), given)
        first, count = equation.params["num_consts"], equation.params["num_carry"]
        may = [(here, at) not in self._blocked for at in range(count)]
        given[first : first + count] = [one and ok for one, ok in zip(given[first : first + count], may, strict=True)]
        while True:
            found = self.find(inner[0].jaxpr, (*here, 0), given)
            before = given[first : first + count]
            after = [old or (new and ok) for old, new, ok in zip(before, found, may, strict=False)]
            if before == after:
                return [*after, *found[count:]]
            given[first : first + count] = after

    def _summed(self, equation: JaxprEqn, here: Path) -> tuple[int | None, ...]:
        return summed_along(equation, self._dims[here], self._count)

    # What is needed

    def need(self, jaxpr: Jaxpr, path: Path, whole: Numbers, parts: Numbers) -> tuple[Numbers, Numbers]:
        """Notes how equations are computed for results. **Returns:** which inputs are needed as a whole, in parts."""
        known = self._sums[path]
        wholes: set[Any] = {jaxpr.outvars[at] for at in whole}
        in_parts: set[Any] = set()
        self._want([jaxpr.outvars[at] for at in parts], known, wholes, in_parts)
        for at in reversed(range(len(jaxpr.eqns))):
            equation, here = jaxpr.eqns[at], (*path, at)
            of_whole = frozenset(at for at, one in enumerate(equation.outvars) if one in wholes)
            of_parts = frozenset(at for at, one in enumerate(equation.outvars) if one in in_parts)
            self._ways.pop(here, None)
            if of_whole or of_parts:
                self._way(equation, here, (of_whole, of_parts), known, wholes, in_parts)
        inputs = enumerate(jaxpr.invars)
        found = [(at, one in wholes, one in in_parts) for at, one in inputs]
        return frozenset(at for at, one, _ in found if one), frozenset(at for at, _, one in found if one)

    def _want(self, atoms: Sequence[Any], known: Mapping[Any, bool], wholes: set[Any], in_parts: set[Any]) -> None:
        """Notes that atoms are needed in parts: what is no sum as a whole, of which one device then has all."""
        for atom in atoms:
            if not isinstance(atom, Constant):
                (in_parts if _known(known, atom) else wholes).add(atom)

    def _way(
        self,
        equation: JaxprEqn,
        here: Path,
        needed: tuple[Numbers, Numbers],
        known: Mapping[Any, bool],
        wholes: set[Any],
        in_parts: set[Any],
    ) -> None:
        operands, (of_whole, of_parts) = equation.invars, needed
        if of_parts and equation.primitive in _ENTERED:
            self._enter(equation, here, needed, known, wholes, in_parts)
            return
        if of_whole or not of_parts:
            wholes.update(atom for atom in operands if not isinstance(atom, Constant))
        if not of_parts:
            self._ways[here] = _Way("plain", *needed)
            return
        linear, summed = linear_in(equation, [_known(known, atom) for atom in operands]), self._summed(equation, here)
        if summed and (not linear or equation.primitive is scatter_add_p):
            linear = (0,) if equation.primitive is scatter_add_p else ()
            self._ways[here] = _Way("summed", *needed, summed=summed, linear=linear)
        else:
            self._ways[here] = _Way("linear", *needed, linear=linear)
        self._split(operands, linear, known, wholes, in_parts)

    def _split(self, operands: Any, linear: Any, known: Any, wholes: set[Any], in_parts: set[Any]) -> None:
        self._want([operands[at] for at in linear], known, wholes, in_parts)
        others = [one for at, one in enumerate(operands) if at not in linear]
        wholes.update(atom for atom in others if not isinstance(atom, Constant))

    def _enter(
        self,
        equation: JaxprEqn,
        here: Path,
        needed: tuple[Numbers, Numbers],
        known: Mapping[Any, bool],
        wholes: set[Any],
        in_parts: set[Any],
    ) -> None:
        body, (whole, parts) = bodies(equation)[0], needed
        carried: tuple[Numbers, Numbers] = frozenset(), frozenset()
        if equation.primitive is scan_p:
            first, count = equation.params["num_consts"], equation.params["num_carry"]
            while True:
                found = self.need(body.jaxpr, (*here, 0), whole, parts)
                own = [frozenset(at - first for at in one if first <= at < first + count) for one in found]
                if own[0] <= whole and own[1] <= parts:
                    break
                whole, parts = whole | own[0], parts | own[1]
            carried = _below(whole, count), _below(parts, count)
            if both := carried[0] & carried[1]:
                self._blocked.update((here, at) for at in both)
                raise _Again
        found = self.need(body.jaxpr, (*here, 0), whole, parts)
        if equation.primitive is scan_p:  # what is carried begins somewhere
            first = equation.params["num_consts"]
            found = found[0] | {first + at for at in carried[0]}, found[1] | {first + at for at in carried[1]}
        self._ways[here] = _Way("entered", whole, parts, given=found, carried=carried)
        wholes.update(one for at in found[0] if not isinstance(one := equation.invars[body.operands[at]], Constant))
        self._want([equation.invars[body.operands[at]] for at in found[1]], known, wholes, in_parts)

    # What is computed

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        path: Path,
        wholes: dict[Any, Any],
        in_parts: dict[Any, Any],
        needed: tuple[Numbers, Numbers],
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Returns the results that are needed, as a whole and in parts. **Arguments:** values of inputs, likewise."""
        wholes.update(zip(jaxpr.constvars, consts, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Constant) else wholes[atom]

        def read_parts(atom: Any) -> Any:
            own = None if isinstance(atom, Constant) else in_parts.get(atom)
            return self._first(read(atom)) if own is None else own

        for at, equation in enumerate(jaxpr.eqns):
            here = (*path, at)
            way, out = self._ways.get(here), equation.outvars
            if way is None:
                continue
            if way.kind == "entered":
                found = self._entered(equation, here, way, read, read_parts)
                wholes.update({out[at]: one for at, one in found[0].items()})
                in_parts.update({out[at]: one for at, one in found[1].items()})
                continue
            if way.whole:
                wholes.update(zip(out, bind(equation, [read(one) for one in equation.invars]), strict=True))
            if way.parts:
                inputs = [read_parts(one) if at in way.linear else read(one) for at, one in enumerate(equation.invars)]
                run = self._sum_of if way.kind == "summed" else _of_each
                in_parts.update(zip(out, run(equation, way, inputs), strict=True))
        own = {at: read(jaxpr.outvars[at]) for at in needed[0]}
        return own, {at: read_parts(jaxpr.outvars[at]) for at in needed[1]}

    def _sum_of(self, equation: JaxprEqn, way: _Way, inputs: Sequence[Any]) -> list[Any]:
        """Returns what each device sums of its own samples."""
        axes = self._axes

        def local(*inputs: Any) -> Any:
            own = [one[0] if at in way.linear else one for at, one in enumerate(inputs)]
            return bind(equation, own)[0][None]

        specs = [PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, axes) for dim in way.summed]
        for at in way.linear:
            specs[at] = PartitionSpec(axes)
        island: Any = jax.shard_map(
            local, in_specs=tuple(specs), out_specs=PartitionSpec(axes), axis_names={*axes}, check_vma=False
        )
        return [island(*inputs)]

    def _first(self, value: Any) -> Any:
        """Returns parts of which the first device has all."""
        value = jnp.asarray(value)
        at = jnp.arange(self._count).reshape(-1, *[1] * value.ndim)
        parts = jnp.where(at == 0, value[None], jnp.zeros((), value.dtype))
        free = [PartitionSpec.UNCONSTRAINED] * value.ndim
        return jax.lax.with_sharding_constraint(parts, PartitionSpec(self._axes, *free))

    def _entered(self, equation: JaxprEqn, here: Path, way: _Way, read: Any, read_parts: Any) -> Any:
        body, inner, operands = bodies(equation)[0], (*here, 0), equation.invars
        given = [sorted(one) for one in way.given]
        wholes, parts = ([operands[body.operands[at]] for at in one] for one in given)
        whole, in_parts = [read(one) for one in wholes], [read_parts(one) for one in parts]
        if equation.primitive is scan_p:
            return self._looped(equation, inner, way, given, (whole, in_parts))
        if equation.primitive is remat_p:  # what is computed again is not computed before it is needed
            whole, in_parts = jax.lax.optimization_barrier((whole, in_parts))
        known, known_parts = _by_input(body.jaxpr, given, (whole, in_parts))
        return self.run(body.jaxpr, body.consts, inner, known, known_parts, (way.whole, way.parts))

    def _looped(self, equation: JaxprEqn, inner: Path, way: _Way, given: Any, values: Any) -> Any:
        body, params = bodies(equation)[0], equation.params
        first, count = params["num_consts"], params["num_carry"]
        by_number = [dict(zip(*pair, strict=True)) for pair in zip(given, values, strict=True)]
        consts = [{at: one for at, one in found.items() if at < first} for found in by_number]
        xs = [{at: one for at, one in found.items() if at >= first + count} for found in by_number]
        xs[1] = {at: jnp.moveaxis(one, 0, 1) for at, one in xs[1].items()}
        begun = [{at: found[first + at] for at in own} for found, own in zip(by_number, way.carried, strict=True)]

        def step(carry: Any, slices: Any) -> Any:
            environments: list[dict[Any, Any]] = []
            for own, carried, sliced in zip(consts, carry, slices, strict=True):
                known = {**own, **{first + at: one for at, one in carried.items()}, **sliced}
                environments.append({body.jaxpr.invars[at]: one for at, one in known.items()})
            whole, in_parts = environments
            found = self.run(body.jaxpr, body.consts, inner, whole, in_parts, (way.whole, way.parts))
            kept = [{at: one[at] for at in own} for one, own in zip(found, way.carried, strict=True)]
            return kept, [{at: value for at, value in one.items() if at >= count} for one in found]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = jax.lax.scan(step, begun, xs, **options)
        stacked[1] = {at: jnp.moveaxis(one, 1, 0) for at, one in stacked[1].items()}
        return [{**own, **ys} for own, ys in zip(carry, stacked, strict=True)]


def _of_each(equation: JaxprEqn, way: _Way, inputs: Sequence[Any]) -> list[Any]:
    """Returns what a linear equation makes of each part."""
    at = tuple(0 if each in way.linear else None for each in range(len(inputs)))
    return jax.vmap(lambda *own: bind(equation, own), in_axes=at)(*inputs)


def _by_input(jaxpr: Jaxpr, given: Any, values: Any) -> list[dict[Any, Any]]:
    pairs = zip(given, values, strict=True)
    return [{jaxpr.invars[at]: one for at, one in zip(*pair, strict=True)} for pair in pairs]


def _known(known: Mapping[Any, bool], atom: Any) -> bool:
    return not isinstance(atom, Constant) and known.get(atom, False)


def _below(numbers: Numbers, count: int) -> Numbers:
    return frozenset(at for at in numbers if at < count)
