"""The order in which a program may be cut: calls written out, and what needs no other work beside what needs it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxprs_in_params
from jax.extend.core import primitives as p
from jax.extend.core.primitives import closed_call_p, jit_p, scan_p

from braidax.program.bodies import Path, aval_of, every_equation
from braidax.program.costs import bytes_of
from braidax.program.inline import is_specified
from braidax.program.kinds import ARGUMENTS, CUMULATIVE, ELEMENTWISE, REDUCTIONS, SLICES
from braidax.program.rewrite import Replacement, evaluate
from braidax.program.trace import Program, trace

from .part import variables

Leaves = frozenset[int]
"""Inputs of a program, by number."""


def in_order(program: Program, params: Leaves) -> Program:
    """Returns a program of the same values whose equations stand in an order for cuts.

    Jitted functions that hold something to cut between are written out. An equation of inputs alone, such as a lookup,
    stands right before what first needs it, and a sum of parameters right behind what else reads these. What makes
    less of a value, such as the mean for a metric, stands right behind what makes that.

    **Arguments:** `params`: the inputs that are trained.
    """
    program = _written_out(program)
    jaxpr = program.closed.jaxpr
    free = find_free(jaxpr, params)
    keys: list[tuple[int, ...]] = [(-1, at) if at in free.equations else (at, 0) for at in range(len(jaxpr.eqns))]
    own = [at for at in range(len(jaxpr.eqns)) if at not in free.equations]
    alone = [at for at in own if free.gives(jaxpr.eqns[at].invars) and not jaxpr.eqns[at].effects]
    for at in alone:
        if not is_light(jaxpr.eqns[at]):
            keys[at] = (_first_reader(jaxpr, at), -1, at)
    for at in alone:
        if is_light(jaxpr.eqns[at]):
            first = _first_reader(jaxpr, at), -1, at
            others = [keys[one] for one in _other_readers(jaxpr, at, free, params) if keys[one] < first]
            keys[at] = (*max(others), 1, at) if others else first
    made = dict[Any, int]()
    for at in own:
        equation = jaxpr.eqns[at]
        operands = [one for one in variables(equation.invars) if one in made]
        if operands and is_light(equation) and _bytes(equation.outvars) < _bytes(operands):
            keys[at] = (*max(keys[made[one]] for one in operands), 1, at)
        made.update(dict.fromkeys(equation.outvars, at))
    equations = [jaxpr.eqns[at] for at in sorted(range(len(keys)), key=lambda at: keys[at])]
    closed = ClosedJaxpr(jaxpr.replace(eqns=equations), program.closed.consts)
    return Program(closed, program.in_specs, program.out_specs)


@dataclass(frozen=True)
class Free:
    """What may be computed in any stage: little work, on inputs of the program alone.

    **Fields:** `equations`: by number. `values`: with the inputs that each is made of.
    """

    equations: frozenset[int]
    values: Mapping[Var, Leaves]

    def gives(self, atoms: Sequence[Any]) -> bool:
        """Whether all of these are there without any other work."""
        return all(atom in self.values for atom in variables(atoms))

    def leaves(self, atoms: Sequence[Any]) -> Leaves:
        """Returns the inputs that those of them that are free are made of."""
        return Leaves().union(*(self.values.get(atom, Leaves()) for atom in variables(atoms)))


def find_free(jaxpr: Jaxpr, params: Leaves) -> Free:
    """Finds what is free; sums of parameters are not, since they belong where these are."""
    values: dict[Var, Leaves] = {variable: Leaves() for variable in jaxpr.constvars}
    values.update((variable, Leaves([at])) for at, variable in enumerate(jaxpr.invars))
    found = set[int]()
    free = Free(frozenset(), values)
    for at, equation in enumerate(jaxpr.eqns):
        if is_light(equation) and free.gives(equation.invars):
            leaves = free.leaves(equation.invars)
            if not (leaves & params and any(one.primitive in _SUMS for one in _with_inner(equation))):
                found.add(at)
                values.update(dict.fromkeys(equation.outvars, leaves))
    return Free(frozenset(found), values)


def is_light(equation: JaxprEqn) -> bool:
    """Whether an equation, with all that it holds, is so little work that no cut needs to go beside it."""
    return not equation.effects and all(
        one.primitive in _LIGHT or one.primitive.name in _LIGHT_NAMES for one in _with_inner(equation)
    )


def _with_inner(equation: JaxprEqn) -> list[JaxprEqn]:
    return [equation, *(one for inner in jaxprs_in_params(equation.params) for one in every_equation(inner))]


def _first_reader(jaxpr: Jaxpr, at: int) -> int:
    """Returns the first equation that reads what one makes; itself when none does."""
    made, later = variables(jaxpr.eqns[at].outvars), range(at + 1, len(jaxpr.eqns))
    return next((one for one in later if made & variables(jaxpr.eqns[one].invars)), at)


def _other_readers(jaxpr: Jaxpr, at: int, free: Free, params: Leaves) -> list[int]:
    """Returns the pieces of work that read the same parameters as an equation."""
    leaves = free.leaves(jaxpr.eqns[at].invars) & params
    readers = (other for other, one in enumerate(jaxpr.eqns) if free.leaves(one.invars) & leaves)
    return [other for other in readers if not is_light(jaxpr.eqns[other])]


def _bytes(atoms: Iterable[Any]) -> int:
    return sum(bytes_of(aval_of(atom)) for atom in atoms)


def _written_out(program: Program) -> Program:
    def rules_of(closed: ClosedJaxpr) -> dict[Path, Replacement]:
        calls = [at for at, one in enumerate(closed.jaxpr.eqns) if _holds_cuts(one)]
        return {(at,): lambda equation, inputs: run(_body_of(equation), inputs) for at in calls}

    def run(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        return evaluate(closed, rules_of(closed), args)[0]

    if not rules_of(program.closed):
        return program

    def whole(*args: Any) -> Any:
        outputs = run(program.closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(program.out_specs), outputs)

    return trace(whole, *program.in_specs)


def _body_of(call: JaxprEqn) -> ClosedJaxpr:
    return call.params["jaxpr" if call.primitive is jit_p else "call_jaxpr"]


def _holds_cuts(equation: JaxprEqn) -> bool:
    """Whether an equation is a call in which there is a loop, or more than one piece of work."""
    if equation.primitive not in (jit_p, closed_call_p) or (equation.primitive is jit_p and is_specified(equation)):
        return False
    own = [one for one in _body_of(equation).jaxpr.eqns if not is_light(one)]
    return len(own) > 1 or any(one.primitive is scan_p or _holds_cuts(one) for one in own)


_SUMS = REDUCTIONS | ARGUMENTS | CUMULATIVE
_LIGHT: frozenset[Any] = frozenset(
    {
        *ELEMENTWISE, *_SUMS, *SLICES,
        p.broadcast_in_dim_p, p.concatenate_p, p.iota_p, p.reshape_p, p.rev_p, p.squeeze_p, p.transpose_p,
        p.random_bits_p, p.random_fold_in_p, p.random_seed_p, p.random_split_p, p.threefry2x32_p,
        jit_p, closed_call_p, p.custom_jvp_call_p, p.custom_vjp_call_p,
    }
)  # fmt: skip
_LIGHT_NAMES = frozenset({"random_wrap", "random_unwrap", "split", "expand_dims", "optimization_barrier"})
