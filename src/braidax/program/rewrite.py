"""Rewriting: a jaxpr is evaluated with rules in place of chosen equations, and everything else as it was."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import closed_call_p, cond_p, jit_p, remat_p, scan_p, while_p
from jax.extend.source_info_util import current_name_stack, user_context

from braidax.errors import ArgumentError

from .bodies import Body, Path, aval_of, bind, bodies

Replacement = Callable[[JaxprEqn, list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Rule:
    """What stands in place of one equation and talks with the outside.

    **Arguments:** `replace`: called with the equation, its inputs, and what is fed to it (a PyTree: one slice for each
    step of the scans around it; None when nothing is fed); gives the outputs, and a PyTree that is brought out (stacked
    by the scans around it). What it closes over arrives whole, at any depth. `absent`: the number that fills what is
    brought out of a branch that was not taken.
    """

    replace: Callable[[JaxprEqn, list[Any], Any], tuple[Sequence[Any], Any]]
    absent: int | float = 0


def evaluate(
    closed: ClosedJaxpr,
    rules: Mapping[Path, Replacement | Rule],
    args: Sequence[Any],
    fed: Mapping[Path, Any] | None = None,
    *,
    entered: Mapping[Path, Callable[[list[Any], Any], None]] | None = None,
    made: Mapping[Path, Callable[[Sequence[Any]], None]] | None = None,
    unguarded: Mapping[Path, Collection[int]] | None = None,
) -> tuple[list[Any], dict[Path, Any]]:
    """Evaluates a jaxpr with rules in place of some equations.

    Every other equation is bound again as it stands, with its source line, its names and its context. One that holds
    jaxprs is rebuilt only when a rule applies inside; jit borders stay. Rules run under the mesh of the caller.

    **Arguments:** `rules`: for the path of each chosen equation a function of the equation and its inputs that gives
    its outputs, or a `Rule`. `args`: flat inputs, arrays or tracers. `fed`: for the path of a `Rule`, the PyTree that
    is fed to it, with a leading dim for every scan around it, the outermost first. `entered`: for the path of a jaxpr,
    () for the whole, a function that is shown its inputs, and what is fed to that path, before anything in it is
    evaluated; rules inside may use what it makes of them. `made`: for the path of an equation a function that is shown
    its outputs; rules behind it, at any depth, may use what it makes of them. `unguarded`: for the path of a remat in a
    loop, inputs that are not held back until the others are there, when it is computed again; outside of a loop XLA
    would see that they are those of the first time.

    **Returns:** the flat outputs, and for the path of each `Rule` what it brought out.

    **Raises:** `ArgumentError` for a path into an equation that cannot be entered, or when a `Rule` inside a while
    feeds on something or brings something out.
    """
    every = {path: rule if isinstance(rule, Rule) else _silent(rule) for path, rule in rules.items()}
    scope = _Scope(
        every, dict(entered or {}), dict(made or {}), dict(unguarded or {}), jax.sharding.get_abstract_mesh()
    )
    with jax.debug_nans(False):  # as JAX does when it evaluates a jaxpr: some primitives pass through NaN on purpose
        outputs, taken = scope.evaluate(closed.jaxpr, closed.consts, args, dict(fed or {}))
    return outputs, {path: tree for path, tree in taken.items() if isinstance(rules[path], Rule)}


def _silent(replacement: Replacement) -> Rule:
    return Rule(lambda equation, inputs, _: (replacement(equation, inputs), None))


@dataclass(frozen=True)
class _Scope:
    """What `evaluate` was given for one jaxpr, by paths that start in it, and the mesh under which rules run."""

    rules: dict[Path, Rule]
    entered: dict[Path, Callable[[list[Any], Any], None]]
    made: dict[Path, Callable[[Sequence[Any]], None]]
    unguarded: dict[Path, Collection[int]]
    mesh: Any

    def within(self, step: int) -> "_Scope":
        every = (self.rules, self.entered, self.made, self.unguarded)
        rules, entered, made, unguarded = (_below(paths, step) for paths in every)
        return _Scope(rules, entered, {path: see for path, see in made.items() if path}, unguarded, self.mesh)

    def evaluate(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], fed: dict[Path, Any]
    ) -> tuple[list[Any], dict[Path, Any]]:
        values: dict[Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        taken: dict[Path, Any] = {}
        chosen = {path[0] for path in (*self.rules, *self.entered) if path}
        chosen |= {path[0] for path in self.made if len(path) > 1}
        if () in self.entered:
            with jax.sharding.use_abstract_mesh(self.mesh):
                self.entered[()](list(args), fed.get(()))
        _check_steps(chosen, len(jaxpr.eqns))
        for index, equation in enumerate(jaxpr.eqns):
            inputs = [read(atom) for atom in equation.invars]
            names = current_name_stack() + equation.source_info.name_stack
            with user_context(equation.source_info.traceback, name_stack=names), equation.ctx.manager:
                if index in chosen:
                    with jax.sharding.use_abstract_mesh(self.mesh):
                        outputs, more = self.within(index)._replace(equation, inputs, _below(fed, index))
                    taken |= {(index, *path): tree for path, tree in more.items()}
                else:
                    outputs = bind(equation, inputs)
            if (index,) in self.made:
                with jax.sharding.use_abstract_mesh(self.mesh):
                    self.made[index,](outputs)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars], taken

    def _replace(
        self, equation: JaxprEqn, inputs: list[Any], fed: dict[Path, Any]
    ) -> tuple[Sequence[Any], dict[Path, Any]]:
        if () in self.rules:
            outputs, tree = self.rules[()].replace(equation, inputs, fed.get(()))
            return outputs, {(): tree}
        inner = bodies(equation)
        if not inner:
            raise ArgumentError(
                f"rules has a path into {equation.primitive.name}, which cannot be entered: choose the equation itself"
            )
        _check_steps({path[0] for path in (*self.rules, *self.entered, *self.made)}, len(inner))
        return _REBUILD[equation.primitive](self, equation, inner, inputs, fed)

    def run(
        self, which: int, body: Body, args: Sequence[Any], fed: dict[Path, Any]
    ) -> tuple[list[Any], dict[Path, Any]]:
        outputs, taken = self.within(which).evaluate(body.jaxpr, body.consts, args, _below(fed, which))
        return outputs, {(which, *path): tree for path, tree in taken.items()}


def _check_steps(steps: Collection[int], limit: int) -> None:
    if wrong := [step for step in steps if not 0 <= step < limit]:
        raise ArgumentError(
            f"rules has a path through {wrong[0]}, expected below {limit}: take paths from an analysis of this program"
        )


def _below(paths: Mapping[Path, Any], step: int) -> dict[Path, Any]:
    return {path[1:]: value for path, value in paths.items() if path[:1] == (step,)}


def _rebuild_jit(
    scope: _Scope, equation: JaxprEqn, inner: tuple[Body, ...], inputs: list[Any], fed: dict[Path, Any]
) -> Any:
    def call(args: list[Any], fed: dict[Path, Any]) -> Any:
        return scope.run(0, inner[0], args, fed)

    params = equation.params
    call.__name__ = call.__qualname__ = params["name"]
    options: dict[str, Any] = {"inline": params["inline"], "keep_unused": params["keep_unused"]}
    if any(isinstance(entry, jax.sharding.Sharding) for entry in params["in_shardings"]):
        options["in_shardings"] = (_specified(params["in_shardings"]), None)
    if any(isinstance(entry, jax.sharding.Sharding) for entry in params["out_shardings"]):
        options["out_shardings"] = (_specified(params["out_shardings"]), None)
    return jax.jit(call, **options)(inputs, fed)


def _specified(shardings: Sequence[Any]) -> list[Any]:
    return [entry if isinstance(entry, jax.sharding.Sharding) else None for entry in shardings]


def _rebuild_call(
    scope: _Scope, equation: JaxprEqn, inner: tuple[Body, ...], inputs: list[Any], fed: dict[Path, Any]
) -> Any:
    return scope.run(0, inner[0], inputs, fed)


def _rebuild_remat(
    scope: _Scope, equation: JaxprEqn, inner: tuple[Body, ...], inputs: list[Any], fed: dict[Path, Any]
) -> Any:
    traced = _Traced(scope, 0, inner[0], fed)
    params = dict(equation.params, jaxpr=traced.closed.jaxpr)
    guards = params["prevent_cse"]
    if isinstance(guards, tuple) or scope.unguarded.get(()):
        guards = guards if isinstance(guards, tuple) else (guards,) * len(inputs)
        own = (guard and at not in scope.unguarded.get((), ()) for at, guard in enumerate(guards))
        params["prevent_cse"] = (*[True] * len(traced.consts), *own, *[True] * len(traced.fed))
    return traced.read(remat_p.bind(*traced.consts, *inputs, *traced.fed, **params))


def _rebuild_scan(
    scope: _Scope, equation: JaxprEqn, inner: tuple[Body, ...], inputs: list[Any], fed: dict[Path, Any]
) -> Any:
    length = equation.params["length"]
    for leaf in jax.tree.leaves(fed):
        if not leaf.shape or leaf.shape[0] != length:
            raise ArgumentError(f"fed has a leaf {leaf.shape} for a scan of length {length}: stack one slice per step")
    slices = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), fed)
    traced = _Traced(scope, 0, inner[0], slices)
    num_consts = equation.params["num_consts"] + len(traced.consts)
    params = dict(equation.params, jaxpr=traced.closed, num_consts=num_consts)
    return traced.read(scan_p.bind(*traced.consts, *inputs, *jax.tree.leaves(fed), **params))


def _rebuild_while(
    scope: _Scope, equation: JaxprEqn, inner: tuple[Body, ...], inputs: list[Any], fed: dict[Path, Any]
) -> Any:
    params = equation.params
    condition, body = (_Traced(scope, which, inner[which], fed) for which in range(2))
    if fed or condition.brought.num_leaves or body.brought.num_leaves:
        raise ArgumentError("rules has a Rule inside a while that is fed or brings out: the number of steps is unknown")
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    operands = [
        *condition.consts, *inputs[:first], *body.consts, *inputs[first:second], *inputs[second:]
    ]  # fmt: skip
    changed: dict[str, Any] = {
        "cond_jaxpr": condition.closed, "cond_nconsts": first + len(condition.consts),
        "body_jaxpr": body.closed, "body_nconsts": second - first + len(body.consts),
    }  # fmt: skip
    outputs, taken = body.read(while_p.bind(*operands, **dict(params, **changed)))
    return outputs, taken | condition.read([])[1]


def _rebuild_cond(
    scope: _Scope, equation: JaxprEqn, inner: tuple[Body, ...], inputs: list[Any], fed: dict[Path, Any]
) -> Any:
    """Every branch takes everything and brings out everything: what belongs to another one is `absent`."""
    shapes = [_Traced(scope, which, body, fed).brought_specs for which, body in enumerate(inner)]

    def absent(which: int) -> dict[Path, Any]:
        missing = {path: tree for other, specs in enumerate(shapes) if other != which for path, tree in specs.items()}
        return {
            path: jax.tree.map(lambda leaf, fill=scope.rules[path].absent: jnp.full(leaf.shape, fill, leaf.dtype), tree)
            for path, tree in missing.items()
        }

    traced = [_Traced(scope, which, body, fed, lambda which=which: absent(which)) for which, body in enumerate(inner)]
    consts = [value for branch in traced for value in branch.consts]
    branches = [branch.among(traced) for branch in traced]
    params = dict(equation.params, branches=tuple(branches))
    return traced[0].read(cond_p.bind(inputs[0], *consts, *inputs[1:], *traced[0].fed, **params))


class _Traced:
    """A body after rewriting: `closed` takes `consts` (what rules close over), the body's inputs, and `fed`."""

    def __init__(
        self,
        scope: _Scope,
        which: int,
        body: Body,
        fed: dict[Path, Any],
        absent: Callable[[], dict[Path, Any]] = dict[Path, Any],
    ) -> None:
        self.fed, structure = jax.tree.flatten(fed)
        num_inputs = len(body.jaxpr.invars)

        def call(*args: Any) -> tuple[list[Any], dict[Path, Any]]:
            outputs, taken = scope.run(which, body, args[:num_inputs], structure.unflatten(args[num_inputs:]))
            return outputs, taken | absent()

        avals = [aval_of(variable) for variable in body.jaxpr.invars]
        inputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
        closed, (outputs, self.brought_specs) = jax.make_jaxpr(call, return_shape=True)(*inputs, *self.fed)
        self.num_outputs = len(outputs)
        self.brought = jax.tree.structure(self.brought_specs)
        self.consts: list[Any] = list(closed.consts)
        self.closed = _with_inputs(closed.jaxpr, [*closed.jaxpr.constvars, *closed.jaxpr.invars])

    def read(self, flat: Sequence[Any]) -> tuple[list[Any], dict[Path, Any]]:
        """Splits what the rebuilt equation gave into outputs and what was brought out."""
        return list(flat[: self.num_outputs]), self.brought.unflatten(flat[self.num_outputs :])

    def among(self, branches: Sequence["_Traced"]) -> ClosedJaxpr:
        """The same as a branch of a cond: it takes the constants of all, and reads its own."""
        inputs = list(self.closed.jaxpr.invars)
        held: list[Var] = []
        for branch in branches:
            own = branch.closed.jaxpr.invars[: len(branch.consts)]
            held += own if branch is self else [Var(variable.aval) for variable in own]
        return _with_inputs(self.closed.jaxpr, [*held, *inputs[len(self.consts) :]])


def _with_inputs(jaxpr: Jaxpr, invars: Sequence[Var]) -> ClosedJaxpr:
    return ClosedJaxpr(
        jaxpr.replace(constvars=[], invars=list(invars), debug_info=jaxpr.debug_info.with_unknown_names()), []
    )


_REBUILD: dict[Any, Any] = {
    jit_p: _rebuild_jit,
    closed_call_p: _rebuild_call,
    remat_p: _rebuild_remat,
    scan_p: _rebuild_scan,
    while_p: _rebuild_while,
    cond_p: _rebuild_cond,
}
