"""The contract of strategies, and what they share."""

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from braidax.errors import ArgumentError, SpecError

from .costs.machine import Machine
from .costs.ring import RingWork
from .layout import Axis, Layout
from .model import Model
from .placements import Gathered, Placement, Rotated, Rows, Served, Split

_MAX_NAMED = 5


@dataclass(frozen=True)
class Choice:
    """What a strategy has chosen for a variable on an axis.

    **Fields:** `placement`, and `why`. `alpha`: the part of its rows that a step touches, where that was measured;
    `sent_bytes`: what a device then sends for them in a step. `ring`: of what may go around, what a hop takes.
    `exposed_seconds`: that a device waits in a step for what is sent for it, by a machine's figures. `num_rows`: how
    many rows a device reads of it in a step, where that was measured.
    """

    placement: Placement
    why: str
    alpha: float | None = None
    sent_bytes: int | None = None
    ring: RingWork | None = None
    exposed_seconds: float | None = None
    num_rows: float | None = None


@runtime_checkable
class Strategy(Protocol):
    """Says what happens to every variable on one mesh axis, and whether the batch is split over it."""

    @property
    def splits_batch(self) -> bool:
        """Whether samples are divided among the devices along the axis."""
        ...

    def place(self, model: Model, axis: Axis, taken: Mapping[str, Layout]) -> Mapping[str, Choice]:
        """Returns the choice for every variable of a model, by path.

        **Arguments:** `taken`: how variables lie on the axes before this one.

        **Raises:** `ArgumentError` when an override asks for what cannot be.
        """
        ...


def _check_overrides(overrides: Mapping[str, Placement], model: Model) -> None:
    """Raises `ArgumentError` for an override that is no placement, or names no variable of a model."""
    for pattern, placement in overrides.items():
        if not isinstance(placement, Placement) or isinstance(placement, type):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"overrides[{pattern!r}] is {placement!r}, expected a placement object such as bx.parallel.Replicated()"
            )
        if not any(fnmatch.fnmatchcase(path, pattern) for path in model.variables):
            some = ", ".join([*model.variables][:_MAX_NAMED])
            raise ArgumentError(f"overrides[{pattern!r}] names no variable: expected a pattern of paths such as {some}")


def _overridden(
    overrides: Mapping[str, Placement], path: str, name: str, refuse: Callable[[Placement], str]
) -> Choice | None:
    """Returns what the first matching pattern asks for; None where no pattern matches.

    **Arguments:** `name`: of the strategy, in words. `refuse`: why a placement cannot be, or "".
    """
    for pattern, placement in overrides.items():
        if fnmatch.fnmatchcase(path, pattern):
            if cannot := refuse(placement):
                raise ArgumentError(f"overrides[{pattern!r}] asks for {cannot}; leave it out, or give Replicated()")
            return Choice(placement, f"{name}: by overrides[{pattern!r}]")
    return None


def chosen(
    overrides: Mapping[str, Placement], name: str, model: Model, choose: Callable[[str], Choice]
) -> dict[str, Choice]:
    """Returns for each variable what an override asks for, or what `choose(path)` says."""
    _check_overrides(overrides, model)
    return {
        path: _overridden(overrides, path, name, lambda one, path=path: refused(one, model, path)) or choose(path)
        for path in model.variables
    }


def refused(placement: Placement, model: Model, path: str) -> str:
    """Says why a placement that somebody asks for cannot be, or ""."""
    if isinstance(placement, Rows | Served) and (cannot := why_no_rows(model, path)):
        return f"the rows of {path}, and these cannot be exchanged: {cannot}"
    if isinstance(placement, Served) and (cannot := why_not_served(model)):
        return f"servers for {path}: {cannot}"
    if isinstance(placement, Gathered | Rotated | Split) and 0 <= placement.dim < len(model.variables[path].shape):
        for site in model.sites.get(path, ()):
            if placement.dim not in site.value.entry.dims:
                left = [*site.value.entry.dims]
                return f"dim {placement.dim} of {path}, which a loop takes apart: a step of it has the dims {left}"
    return ""


def why_no_rows(model: Model, path: str) -> str:
    """Says why the rows of a variable cannot be exchanged, or ""."""
    if path in model.frozen:
        return "it is frozen: it has no gradient (Gathered(dim) splits it all the same, and its rows are read in parts)"
    uses = model.uses.get(path)
    if uses is None:
        return "no gradient uses it"
    return uses.why if uses.verdict != "sparse" else model.no_rows(path)


def why_not_served(model: Model, taken: Layout | None = None) -> str:
    """Says why servers cannot have a table whose rows can be exchanged, or "". **Arguments:** `taken`: how it lies."""
    if model.no_padding:
        return f"{model.no_padding}, and servers have their tables to themselves"
    return "split along another axis" if taken is not None and taken.axes else ""


def shown(strategy: Any) -> str:
    """Returns a constructor's call, with what differs from its defaults; of optimizers and counts what they are for."""
    defaults, told = type(strategy)(), list[str]()
    for one in fields(strategy):
        value = getattr(strategy, one.name)
        if value != getattr(defaults, one.name):
            called = (
                {"row_optimizers": [*value], "touched": f"{len(value)} tables"} if isinstance(value, Mapping) else {}
            )
            told.append(f"{one.name}={called.get(one.name, value)!r}")
    return f"{type(strategy).__name__}({', '.join(told)})"


def bytes_where_used(model: Model, path: str) -> int:
    """Returns the bytes of a variable as the loss uses it: within a loop over layers, of one layer."""
    spec = model.variables[path]
    dims = (site.value.entry.dims for site in model.sites.get(path, ()))
    used = min(dims, key=len, default=range(len(spec.shape)))
    return math.prod(spec.shape[dim] for dim in used) * np.dtype(spec.dtype).itemsize


def stages_axis(strategies: Mapping[str, Any]) -> str | None:
    """Returns the mesh axis along which stages lie, that of a `Pipeline`, if there is one.

    **Raises:** `ArgumentError` for several.
    """
    axes = [axis for axis, strategy in strategies.items() if getattr(strategy, "cuts_loss", False)]
    if len(axes) > 1:
        raise ArgumentError(f"strategies has a Pipeline for each of {axes}: expected one axis of stages")
    return axes[0] if axes else None


def check_combine_bytes(combine_bytes: int | None) -> None:
    """Raises `ArgumentError` for a size below zero."""
    if combine_bytes is not None and combine_bytes < 0:
        raise ArgumentError(f"combine_bytes={combine_bytes}: expected a size in bytes, such as 25 << 20, or None")


def in_words(count: float) -> str:
    """Returns a number of bytes as a plan prints it: `1.58 KB`."""
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if count >= pair[0]), (1, "bytes"))
    return f"{count / unit:.3g} {name}"


def check_min_bytes(min_bytes: int) -> None:
    """Raises `ArgumentError` for a size below zero."""
    if min_bytes < 0:
        raise ArgumentError(f"min_bytes={min_bytes}: expected a size in bytes, such as 64 << 10")


def check_room(memory_bytes: int | None, machine: Machine | None) -> None:
    """Raises `ArgumentError` for room for a choice by cost that is none, or without the figures of a machine."""
    if memory_bytes is not None and memory_bytes <= 0:
        raise ArgumentError(f"memory_bytes={memory_bytes}: expected a size in bytes, such as 16 << 30")
    if memory_bytes is not None and machine is None:
        raise ArgumentError(
            f"memory_bytes={memory_bytes} is room for a choice by cost, and machine is None: give "
            f"machine=bx.parallel.measure_machine(mesh), or leave it out"
        )


def num_bytes(spec: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of an array."""
    if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
        spec = jax.eval_shape(jax.random.key_data, spec)
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def check_strategies(mesh: Mesh, strategies: Mapping[str, Any]) -> None:
    """Raises when there is no strategy for each axis, or one stands for an axis that the mesh lacks, or is none."""
    if not isinstance(strategies, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        bare = isinstance(strategies, Strategy) and not isinstance(strategies, type)
        raise ArgumentError(
            f"strategies is {strategies!r}, expected a dict that says what each mesh axis is for: "
            f"strategies={{{mesh.axis_names[0]!r}: bx.{strategies if bare else 'DataParallel()'}}}"
        )
    for axis, strategy in strategies.items():
        if axis not in mesh.axis_names:
            raise SpecError(
                f"strategies names the mesh axis {axis!r}, and the mesh has {mesh.axis_names}: use one of these, or "
                f"make the mesh with jax.make_mesh(shape, names) so that it has an axis {axis!r}"
            )
        if not isinstance(strategy, Strategy) or isinstance(strategy, type):
            raise ArgumentError(
                f"strategies[{axis!r}] is {strategy!r}, expected a strategy object such as bx.DataParallel()"
            )
