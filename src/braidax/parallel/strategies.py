"""Strategies: what one mesh axis is for."""

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from braidax.errors import ArgumentError, SpecError
from braidax.program import LeafUses, named_leaves

from .placements import Placement, Replicated, Rows
from .rows import RowOptimizer
from .touched import Touched, all_reduced_bytes
from .touched import rows_bytes as measured_rows_bytes


@dataclass(frozen=True)
class Variable:
    """What a strategy is told of a variable.

    **Fields:** `path`, `spec`: its name, global shape and dtype. `uses`: how the loss uses it; None where that is not
    known. `no_rows`: why its rows cannot be exchanged though it is used by rows only; "" if they can.
    `microbatches`: of how many times the loss an update consists.
    """

    path: str
    spec: jax.ShapeDtypeStruct
    uses: LeafUses | None = None
    no_rows: str = ""
    microbatches: int = 1


@runtime_checkable
class Strategy(Protocol):
    """Fills in the placement of every variable on one mesh axis, and says whether the batch is split over it."""

    @property
    def splits_batch(self) -> bool:
        """Whether samples are divided among the devices along the axis."""
        ...

    def place(self, variable: Variable, num_parts: int) -> tuple[Placement, str]:
        """Returns the placement of a variable on the axis, and why.

        **Arguments:** `num_parts`: among how many devices a batch is divided, along all axes.
        """
        ...


@dataclass(frozen=True, repr=False)
class DataParallel:
    """Divides the samples of a batch among the devices along the axis; every variable is replicated.

    The loss keeps its meaning over the global batch; gradients are all-reduced.

    **Arguments:** `overrides`, `combine_bytes`: as of `Hybrid`.
    """

    overrides: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    combine_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_combine_bytes(self.combine_bytes)

    def __repr__(self) -> str:
        return _shown(self)

    @property
    def splits_batch(self) -> bool:
        """True."""
        return True

    def place(self, variable: Variable, num_parts: int) -> tuple[Placement, str]:
        """Returns `Replicated`, unless an override says otherwise. **Raises:** as `Hybrid.place`."""
        replicated = Replicated(), "data parallel: gradient all-reduced"
        return _overridden(self.overrides, variable, "data parallel") or replicated


@dataclass(frozen=True, repr=False)
class Hybrid:
    """Divides the samples like `DataParallel`, and decides for each variable how its gradient is synchronized.

    A table that the loss reads by rows only is split by `Rows`, and the rows that a step touches are exchanged, where
    that moves fewer bytes than its whole gradient; everything else is replicated and its gradient all-reduced
    (Parallax, EuroSys 2019, section 3).

    **Arguments:** `overrides`: placements by pattern of the variable's path, such as `{"params/embed*": Replicated()}`
    (`fnmatch`); the first that matches counts. `row_optimizers`: what moves the rows of tables, by pattern, such as
    `{"params/embed*": row_adagrad(0.1)}`; the optimizer of the step moves all others. `touched`: what `measure_touched`
    has counted of tables, by path; where it is given it decides in place of the upper bound that is known without data,
    and the room for rows follows it. `out_of_range`: what becomes of
    ids that no row has. "as jax": what the loss says (`jnp.take(mode=…)`: clipped, filled or promised not to come),
    the same on every device. "raise": `DataError` some updates later. `combine_bytes`: all-reduces are put
    together up to this size, the `bucket_cap` of other frameworks; None leaves it to the compiler (GPUs; the
    CPU's always makes one).
    """

    overrides: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    row_optimizers: Mapping[str, RowOptimizer] = field(default_factory=dict[str, RowOptimizer])
    touched: Mapping[str, Touched] = field(default_factory=dict[str, Touched])
    out_of_range: Literal["as jax", "raise"] = "as jax"
    combine_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_combine_bytes(self.combine_bytes)
        if self.out_of_range not in ("as jax", "raise"):
            raise ArgumentError(f'out_of_range={self.out_of_range!r}: expected "as jax" or "raise"')

    def __repr__(self) -> str:
        return _shown(self)

    @property
    def splits_batch(self) -> bool:
        """True."""
        return True

    def place(self, variable: Variable, num_parts: int) -> tuple[Placement, str]:
        """Returns `Rows` where that is possible and moves fewer bytes, else `Replicated`.

        **Raises:** `ArgumentError` when an override asks for rows of what is not read by rows.
        """
        if overridden := _overridden(self.overrides, variable, "hybrid"):
            return overridden
        if cannot := _why_no_rows(variable):
            return Replicated(), f"hybrid: {cannot}: gradient all-reduced"
        assert variable.uses is not None, "what is not known to be read by rows is replicated"
        touched, seen = self.touched.get(variable.path), ""
        if touched is None:
            moved, whole = rows_bytes(variable, num_parts), 2 * num_bytes(variable.spec)
        else:
            row_bytes = num_bytes(variable.spec) // variable.spec.shape[0]
            seen = f"; {touched}"
            moved = round(measured_rows_bytes(touched, row_bytes))
            whole = round(all_reduced_bytes(touched, row_bytes))
        told = f"a device sends {_in_words(moved)} a step by rows, {_in_words(whole)} all-reduced"
        placement = Rows() if moved < whole else Replicated()
        return placement, f"hybrid: {variable.uses.why}{seen}; {told}"


def _overridden(overrides: Mapping[str, Placement], variable: Variable, name: str) -> tuple[Placement, str] | None:
    """Returns the placement that the first matching pattern asks for, and why; None where no pattern matches."""
    for pattern, placement in overrides.items():
        if fnmatch.fnmatchcase(variable.path, pattern):
            if isinstance(placement, Rows) and (cannot := _why_no_rows(variable)):
                raise ArgumentError(
                    f"overrides[{pattern!r}] asks for the rows of {variable.path}, and these cannot be exchanged: "
                    f"{cannot}; leave it out, or give Replicated()"
                )
            return placement, f"{name}: by overrides[{pattern!r}]"
    return None


def _shown(strategy: DataParallel | Hybrid) -> str:
    """The constructor's call, with what differs from its defaults; of optimizers and counts, what they are for."""
    defaults, told = type(strategy)(), list[str]()
    for one in fields(strategy):
        value = getattr(strategy, one.name)
        if value != getattr(defaults, one.name):
            shown = (
                {"row_optimizers": [*value], "touched": f"{len(value)} tables"} if isinstance(value, Mapping) else {}
            )
            told.append(f"{one.name}={shown.get(one.name, value)!r}")
    return f"{type(strategy).__name__}({', '.join(told)})"


def _check_combine_bytes(combine_bytes: int | None) -> None:
    if combine_bytes is not None and combine_bytes < 0:
        raise ArgumentError(f"combine_bytes={combine_bytes}: expected a size in bytes, such as 25 << 20, or None")


def _why_no_rows(variable: Variable) -> str:
    if variable.uses is None:
        return "no gradient uses it"
    if variable.uses.verdict != "sparse":
        return variable.uses.why
    return variable.no_rows


def rows_bytes(variable: Variable, num_parts: int) -> int:
    """Returns an upper bound of the bytes that a device sends in a step to exchange the rows of a table.

    For each of its `n` ids the number, the row, and its gradient: `n (4 + 2 D b)`. Ids that come up twice are sent
    once, but how many do is not known here.
    """
    assert variable.uses is not None
    num_ids = sum(use.rows.num_ids for use in variable.uses.uses if use.rows is not None) * variable.microbatches
    return -(-num_ids // num_parts) * (4 + 2 * num_bytes(variable.spec) // max(variable.spec.shape[0], 1))


def _in_words(count: int) -> str:
    unit, name = next((pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if count >= pair[0]), (1, "bytes"))
    return f"{count / unit:.3g} {name}"


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


def batch_axes(mesh: Mesh, strategies: Mapping[str, Strategy]) -> tuple[str, ...]:
    """Returns the mesh axes that the batch is split over, in the order of the mesh."""
    return tuple(name for name in mesh.axis_names if name in strategies and strategies[name].splits_batch)


def shard_batch(mesh: Mesh, axes: tuple[str, ...], batch: Any, *, microbatches: int = 1) -> Any:
    """Splits dim 0 of every leaf of a batch over mesh axes.

    **Arguments:** `axes`: the mesh axes, perhaps none. `batch`: PyTree of arrays or specs `[batch, …]`.
    `microbatches`: how many equal pieces must be divisible too.

    **Returns:** a PyTree of `NamedSharding` like `batch`. **Raises:** `SpecError` for a leaf that cannot be split.
    """
    leaves = named_leaves(batch, "batch")
    if not leaves:
        raise ArgumentError(f"batch is {batch!r}, expected a PyTree with at least one array [batch, …]")
    divisor = 1
    for axis in axes:
        divisor *= mesh.shape[axis]
    for path, leaf in leaves:
        if not leaf.shape:
            raise SpecError(f"{path} has no dims, expected [batch, …]: repeat it for every sample, or close over it")
        if leaf.shape[0] % divisor or leaf.shape[0] == 0:
            raise SpecError(
                f"{path} has {leaf.shape[0]} samples, which do not divide among the {divisor} devices along the mesh "
                f"axes {axes}: choose a batch size that is a multiple of {divisor}, or let the loader pad the batch"
            )
        if leaf.shape[0] % (divisor * microbatches):
            raise SpecError(
                f"{path} has {leaf.shape[0]} samples, which do not divide into microbatches={microbatches} for each of "
                f"the {divisor} devices along the mesh axes {axes}: choose a batch size that is a multiple of "
                f"{divisor * microbatches}, or other microbatches"
            )
    spec = PartitionSpec(axes) if axes else PartitionSpec()
    return jax.tree.map(lambda _: NamedSharding(mesh, spec), batch)
