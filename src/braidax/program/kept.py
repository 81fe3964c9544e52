"""Gradients that a traced step takes, kept: one equation holds the function that is differentiated, as it stands.

A derivative is an ordinary part of a jaxpr, and nobody can take it back out of there. So a step that is to be changed
is traced while gradients are kept, and differentiates when it is compiled.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import grad, value_and_grad, vjp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters import ad, batching, mlir

from .bodies import Path, equations_of
from .lines import line_of
from .marks import kept_p, mark_gradient
from .prune import prune
from .trace import Program

_ONE_AT_A_TIME = threading.RLock()
_KEEPING = jax.make_user_context(False)  # so that JAX keeps apart what it traces with it and without


@contextmanager
def gradients_kept() -> Generator[None, None, None]:
    """Within it, in this thread, gradients leave equations that hold what is differentiated.

    `jax.value_and_grad`, `jax.grad` and `jax.vjp` are ours meanwhile, so that libraries that call them are seen, such
    as `flax.nnx` and Equinox. In other threads, and for whom they outlast it, they are JAX's own.
    """
    with _ONE_AT_A_TIME, _KEEPING(True):
        before = jax.value_and_grad, jax.grad, jax.vjp
        jax.value_and_grad, jax.grad, jax.vjp = kept_value_and_grad, _kept_grad, _kept_vjp
        try:
            yield
        finally:
            jax.value_and_grad, jax.grad, jax.vjp = before


def kept_value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., tuple[Any, Any]]:
    """Makes what `jax.value_and_grad` makes; where gradients are kept it leaves one equation.

    The equation computes the value, what of the aux is an array, and the gradients; it takes the leaves that these are
    of, then everything that the function closes over. A function inside of it is differentiated by JAX as ever, and
    so is what has `options`: its gradients are marked.
    """
    own = value_and_grad(fun, argnums, has_aux, **options)

    def value_and_gradient(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not _KEEPING.value:
            return own(*args, **kwargs)
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        known = all(-len(args) <= number < len(args) for number in numbers)
        chosen = tuple(args[number] for number in numbers) if known else ()
        leaves, structure = jax.tree.flatten(chosen)
        if not known or any(options.values()) or not all(_is_real(leaf) for leaf in leaves):
            with _KEEPING(False):
                return mark_gradient(own(*args, **kwargs))

        def flat(*leaves: Any) -> Any:
            given = list(args)
            for number, argument in zip(numbers, structure.unflatten(leaves), strict=True):
                given[number] = argument
            result = fun(*given, **kwargs)
            return _Result.of(result, has_aux)

        value, gradients = _keep(flat, leaves)
        gradients = structure.unflatten(gradients)
        return value, gradients[0] if isinstance(argnums, int) else gradients

    return value_and_gradient


def _kept_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    own, both = grad(fun, argnums, has_aux, **options), kept_value_and_grad(fun, argnums, has_aux, **options)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        if not _KEEPING.value:
            return own(*args, **kwargs)
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def _kept_vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False, **options: Any) -> tuple[Any, ...]:
    """Makes what `jax.vjp` makes; of a function whose value is a real scalar it leaves one equation, as others do.

    What comes back for a scalar is a factor of the gradient.
    """
    leaves, structure = jax.tree.flatten(primals)
    if not _KEEPING.value or any(options.values()) or not leaves or not all(map(_is_real, leaves)):
        return vjp(fun, *primals, has_aux=has_aux, **options)
    with _KEEPING(False):
        value = jax.eval_shape(lambda *given: fun(*given)[0] if has_aux else fun(*given), *primals)
    if not isinstance(value, jax.ShapeDtypeStruct) or value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
        return vjp(fun, *primals, has_aux=has_aux)
    result, gradients = _keep(lambda *leaves: _Result.of(fun(*structure.unflatten(leaves)), has_aux), leaves)

    def pulled(back: Any) -> Any:
        factor = jnp.reshape(back, ())
        return structure.unflatten([(factor * one).astype(one.dtype) for one in gradients])

    return (result[0], pulled, result[1]) if has_aux else (result, pulled)


class _Result:
    """What a function gave: `arrays`, the value first, and how the rest, that JAX never sees, stands around them."""

    def __init__(self, arrays: list[Any], rebuilt: Callable[[Sequence[Any]], Any]) -> None:
        self.arrays, self.rebuilt = arrays, rebuilt

    @classmethod
    def of(cls, result: Any, has_aux: bool) -> "_Result":
        if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):  # pyright: ignore[reportUnknownArgumentType]
            raise TypeError(
                f"a function differentiated with has_aux=True returned {type(result).__name__}, expected the pair "
                f"(value, aux)"
            )
        value, aux = result if has_aux else (result, None)
        leaves, structure = jax.tree.flatten(aux)
        arrays = [at for at, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

        def rebuilt(found: Sequence[Any]) -> Any:
            filled = dict(zip(arrays, found[1:], strict=True))
            aux = structure.unflatten([filled.get(at, leaf) for at, leaf in enumerate(leaves)])
            return (found[0], aux) if has_aux else found[0]

        return cls([value, *(leaves[at] for at in arrays)], rebuilt)


def _keep(fun: Callable[..., _Result], leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the value of `fun`, as it gives it, and its gradients by `leaves`."""
    results: list[_Result] = []

    def traced(*leaves: Any) -> list[Any]:
        results.append(fun(*leaves))
        return results[0].arrays

    with _KEEPING(False):
        closed = jax.make_jaxpr(traced)(*leaves)
    (result,) = results
    operands = [*leaves, *closed.consts]
    if not _is_keepable(closed):
        outputs = _differentiated(_with_consts_as_inputs(closed), len(leaves), operands)
        values, gradients = outputs[: -len(leaves)], outputs[-len(leaves) :]
        return result.rebuilt(values), gradients
    jaxpr, forwarded = _without_forwarded(_with_consts_as_inputs(closed).jaxpr)
    may_go = [at >= len(leaves) for at in range(len(operands))]
    small, kept = prune(ClosedJaxpr(jaxpr, []), [True] * len(jaxpr.outvars), may_go)
    needed = [operand for operand, one in zip(operands, kept, strict=True) if one]
    outputs = kept_p.bind(*needed, jaxpr=small, num_gradients=len(leaves))
    values, gradients = iter(outputs[: len(jaxpr.outvars)]), outputs[len(jaxpr.outvars) :]
    found = [next(values) if at is None else operands[at] for at in forwarded]
    return result.rebuilt(found), list(gradients)


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | float) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _is_keepable(closed: ClosedJaxpr) -> bool:
    """Whether a function gives a real scalar, and reads nothing but arrays; of others JAX itself says what is wrong."""
    value = closed.out_avals[0]
    plain = all(isinstance(v.aval, ShapedArray) for v in (*closed.jaxpr.invars, *closed.jaxpr.constvars))
    return plain and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating) and bool(closed.jaxpr.invars)


def _with_consts_as_inputs(closed: ClosedJaxpr) -> ClosedJaxpr:
    jaxpr = closed.jaxpr
    return ClosedJaxpr(_with(jaxpr, invars=[*jaxpr.invars, *jaxpr.constvars], constvars=[]), [])


def _without_forwarded(jaxpr: Jaxpr) -> tuple[Jaxpr, list[int | None]]:
    """Leaves out results that are inputs; says for each result which input it is, None for one that stays."""
    inputs = {variable: at for at, variable in enumerate(jaxpr.invars)}
    forwarded = [None, *(inputs.get(v) if isinstance(v, Var) else None for v in jaxpr.outvars[1:])]
    stay = [v for v, at in zip(jaxpr.outvars, forwarded, strict=True) if at is None]
    return _with(jaxpr, outvars=stay), forwarded


def _with(jaxpr: Jaxpr, **changed: Any) -> Jaxpr:
    return jaxpr.replace(debug_info=jaxpr.debug_info.with_unknown_names(), **changed)


def _differentiated(jaxpr: ClosedJaxpr, num_gradients: int, operands: Sequence[Any]) -> list[Any]:
    """Computes what a kept equation stands for, with its gradients marked."""
    inputs = range(num_gradients), range(num_gradients, len(operands))
    specs = tuple([_spec(jaxpr.in_avals[at]) for at in some] for some in inputs)
    program = Program(jaxpr, specs, [_spec(aval) for aval in jaxpr.out_avals])
    return mark_gradient(gradients_of(program, num_gradients, operands[:num_gradients], operands[num_gradients:]))


def gradients_of(program: Program, num_gradients: int, first: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Differentiates a program as `Kept.program` returns it, or what passes have made of that.

    **Arguments:** `num_gradients`: of how many of `first` a gradient is taken. `first`, `others`: its arguments.

    **Returns:** the value, what else the program gives, and the gradients.
    """

    def value_of(by: list[Any]) -> Any:
        value, *others_found = program([*by, *first[num_gradients:]], list(others))
        return value, others_found

    (value, found), gradients = value_and_grad(value_of, has_aux=True)(list(first[:num_gradients]))
    return [value, *found, *(jax.lax.convert_element_type(one, one.dtype) for one in gradients)]


@dataclass(frozen=True)
class Kept:
    """A gradient that a jaxpr takes: the `path` of its equation, and how many operands it is taken by, the first."""

    path: Path
    equation: JaxprEqn

    @property
    def num_gradients(self) -> int:
        """How many operands, the first ones, the gradient is taken by."""
        return self.equation.params["num_gradients"]

    @property
    def closed(self) -> ClosedJaxpr:
        """What is differentiated, of all operands."""
        return self.equation.params["jaxpr"]

    @property
    def line(self) -> str:
        """`at file:line`, where the gradient is taken, or ""."""
        line = line_of(self.equation.source_info)
        return f"at {line}" if line else ""

    def program(self, first: Sequence[int]) -> Program:
        """Returns what is differentiated, as a program of two lists of arrays.

        **Arguments:** `first`: the operands of the first list, in order, those that a gradient is taken by in front.
        """
        closed = self.closed
        others = [at for at in range(len(closed.in_avals)) if at not in first]
        jaxpr = _with(closed.jaxpr, invars=[closed.jaxpr.invars[at] for at in (*first, *others)])
        specs = tuple([_spec(closed.in_avals[at]) for at in some] for some in (first, others))
        return Program(ClosedJaxpr(jaxpr, closed.consts), specs, [_spec(aval) for aval in closed.out_avals])


def find_kept(jaxpr: Jaxpr) -> list[Kept]:
    """Lists the gradients that a jaxpr takes, also within loops and branches."""
    return [Kept(path, equation) for path, equation in equations_of(jaxpr) if equation.primitive is kept_p]


def _spec(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _computed(*operands: Any, jaxpr: ClosedJaxpr, num_gradients: int) -> list[Any]:
    return _differentiated(jaxpr, num_gradients, operands)


def _abstract(*avals: Any, jaxpr: ClosedJaxpr, num_gradients: int) -> Any:
    gradients = [ShapedArray(aval.shape, aval.dtype) for aval in avals[:num_gradients]]
    return [*jaxpr.out_avals, *gradients], jaxpr.effects


def _batched(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    outputs = jax.vmap(partial(_computed, **params), in_axes=list(dims))(*operands)
    return outputs, [0] * len(outputs)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    given = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(partial(_computed, **params), tuple(primals), tuple(given))


kept_p.def_impl(_computed)
kept_p.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(kept_p, mlir.lower_fun(_computed, multiple_results=True))
batching.primitive_batchers[kept_p] = _batched
ad.primitive_jvps[kept_p] = _jvp
