"""Names of dims that model libraries keep with their parameters, and the mesh axes that these ask for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from braidax.errors import ArgumentError, SpecError
from braidax.program import join, named_leaves

Names = tuple[Any, ...]
"""Of the dims of a variable: a name, several, or None for each."""

Rules = Mapping[str, Any] | Sequence[tuple[str, Any]]
"""Which mesh axis, or axes, a logical name stands for, or None; of several the first whose axes are free counts."""


def dim_names(params: Any, prefix: str = "params") -> dict[str, Names]:
    """Returns the names of the dims of variables, by path, of those that have any.

    Flax Linen keeps them in boxes (`nn.with_partitioning`, `nn.with_logical_partitioning`), NNX in what a variable is
    told (`nnx.with_partitioning`). **Arguments:** `params`: PyTree of specs; `prefix`: of its paths.
    """
    return dict(_found(params, prefix))


def asked_axes(names: Mapping[str, Names], rules: Rules | None, mesh: Mesh) -> dict[str, dict[str, int]]:
    """Returns for each variable the mesh axes that its names ask for, each with the dim that it splits.

    A name that no rule has and that is an axis of the mesh stands for that axis; any other asks for nothing.

    **Raises:** `SpecError` when a rule names an axis that the mesh has not, `ArgumentError` when no dim has a name.
    """
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules or ())
    for name, axes in pairs:
        for axis in _several(axes):
            if axis not in mesh.axis_names:
                raise SpecError(
                    f"rules gives {name!r} the axis {axis!r}, and the mesh has {mesh.axis_names}: use these, or None"
                )
    if rules is not None and not names:
        raise ArgumentError(
            "rules is given, and no dim of the parameters has a name: keep Flax' boxes (no nn.unbox), or leave it"
        )
    known = {name for name, _ in pairs}
    pairs += [(axis, axis) for axis in mesh.axis_names if axis not in known]
    return {path: _axes_of(dims, pairs) for path, dims in names.items()}


def unruled(dims: Names, rules: Rules | None, mesh: Mesh) -> list[str]:
    """Returns the names of dims that are no axis of the mesh, and of which no rule says anything."""
    known = {*mesh.axis_names, *(dict(rules or ()))}
    return list(dict.fromkeys(name for dim in dims for name in _several(dim) if name not in known))


def _axes_of(dims: Names, pairs: Sequence[tuple[str, Any]]) -> dict[str, int]:
    taken: dict[str, int] = {}
    for dim, names in enumerate(dims):
        for name in _several(names):
            for ruled, axes in pairs:
                if ruled == name and not any(axis in taken for axis in _several(axes)):
                    taken |= dict.fromkeys(_several(axes), dim)
                    break
    return taken


def _found(params: Any, prefix: str) -> Iterator[tuple[str, Names]]:
    boxes: Any = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: _names_of(node) is not None)[0]
    for path, box in boxes:
        names = _names_of(box)
        for inner, spec in named_leaves(box) if names else ():
            whole = join(join(prefix, jax.tree_util.keystr(path, simple=True, separator="/")), inner)
            if names is not None and len(names) > len(spec.shape):
                raise ArgumentError(f"{whole} has the names {names} for its dims, and the shape {list(spec.shape)}")
            yield whole, names or ()


def _names_of(node: Any) -> Names | None:
    """The names that a node of a PyTree keeps: of Linen's boxes, or of a variable of NNX."""
    if hasattr(node, "unbox") and hasattr(node, "get_partition_spec"):
        return tuple(getattr(node, "names", ()))
    if hasattr(node, "get_metadata") and hasattr(node, "get_value"):
        told = node.get_metadata()
        return next((tuple(told[key]) for key in ("out_sharding", "sharding_names", "sharding") if told.get(key)), None)
    return None


def _several(names: Any) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)
