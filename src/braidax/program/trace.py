"""Tracing: a single-device function becomes a jaxpr once, free of any mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, jaxprs_in_params
from jax.sharding import AbstractMesh

from braidax.errors import ArgumentError, StateError

from .axes import unbound_axis, without_axes
from .names import difference, named_leaves


@dataclass(frozen=True)
class Program:
    """A traced function: `closed` is its jaxpr with global shapes; PyTrees go in and come out when it is called.

    `in_specs` is the tuple of arguments and `out_specs` the result, both as PyTrees of `jax.ShapeDtypeStruct`.
    """

    closed: ClosedJaxpr
    in_specs: tuple[Any, ...]
    out_specs: Any

    def __call__(self, *args: Any) -> Any:
        """Computes the program on arguments like `in_specs`, arrays or tracers alike."""
        if message := difference(self.in_specs, args, "arguments"):
            raise ArgumentError(f"a traced program takes what it was traced with: {message}")
        outputs = jaxpr_as_fun(self.closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.out_specs), outputs)


def trace(fn: Callable[..., Any], *args: Any, mesh: AbstractMesh | None = None) -> Program:
    """Traces a function under an empty mesh, so that its meaning cannot depend on where it will run.

    An axis that it names and does not bind, as code for `jax.pmap` does, has one member, which holds the whole batch:
    `lax.pmean` and `lax.psum` are the value itself, `lax.axis_index` is 0.

    **Arguments:** `fn`: a pure function of PyTrees of arrays. `args`: PyTrees of arrays or `jax.ShapeDtypeStruct`.
    `mesh`: with automatic axes, for a program of ours that has islands on it.

    **Returns:** the `Program`. Nothing is computed.
    """
    specs = specs_of(args)
    axes: dict[str, int] = {}
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ()) if mesh is None else mesh):
        while True:
            try:
                closed, out_specs = jax.make_jaxpr(fn, axis_env=[*axes.items()], return_shape=True)(*specs)
                break
            except NameError as error:
                name = unbound_axis(error)
                if name is None or name in axes:
                    raise
                axes[name] = 1
        return Program(without_axes(closed, axes) if axes else closed, specs, specs_of(out_specs))


def specs_of(tree: Any) -> Any:
    """Returns the PyTree of `jax.ShapeDtypeStruct` (no sharding) of a PyTree of arrays, scalars or such specs."""
    return jax.tree.map(spec_of, tree)


def spec_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype (as JAX would hold it) and weak type of one leaf; it must be one that JAX can hold."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.typeof(leaf)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=getattr(leaf, "weak_type", False))


def call_watched(
    call: Callable[[], Any], caller: str, watched: dict[str, Any], *, keeps: Callable[[Any], Any] | None = None
) -> Any:
    """Calls a function that is being traced and raises when it has changed one of its arguments in place.

    **Arguments:** `call`: calls the function. `caller`: its name. `watched`: those of its arguments, by name, that may
    not change. `keeps`: picks the part of the result that is kept, if any; a changed leaf that is in it is fine.

    **Returns:** what `call` returns. **Raises:** `StateError` naming the leaf.
    """
    before = {name: named_leaves(tree, name) for name, tree in watched.items()}
    result = call()
    kept: set[int] = {id(leaf) for leaf in jax.tree.leaves(keeps(result))} if keeps else set()
    for name, tree in watched.items():
        old = dict(before[name])
        new = dict(named_leaves(tree, name))
        for path in [*old, *(path for path in new if path not in old)]:
            if new.get(path) is not old.get(path) and id(new.get(path)) not in kept:
                raise StateError(
                    f"{path} was changed in place by {caller} and the change would be lost: "
                    f"return it (a loss that asks for `variables` returns new ones as aux['variables']); split an "
                    f"object that updates itself first (flax: nnx.split, then nnx.merge inside the function); give a "
                    f"changed batch a name of its own"
                )
    return result


def calls_host(program: Program) -> bool:
    """Returns whether a program calls functions on the host; JAX then computes it on CPUs while it is called."""
    return _calls_host(program.closed.jaxpr)


def _calls_host(jaxpr: Jaxpr) -> bool:
    return any(
        equation.primitive.name in _HOST_CALLS or any(map(_calls_host, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


_HOST_CALLS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})
