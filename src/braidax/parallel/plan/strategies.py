"""Strategies: what one mesh axis is for."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

from braidax.errors import ArgumentError
from braidax.parallel.rows import RowOptimizer
from braidax.parallel.rows.touched import Touched
from braidax.program import Site

from .costs.by_cost import by_cost, placed
from .costs.machine import Machine
from .costs.prices import Prices
from .costs.tables import costs_of
from .layout import Axis, Layout
from .model import Model
from .placements import Gathered, Placement, Replicated, Rows, Served
from .strategy import (
    Choice,
    Strategy,
    bytes_where_used,
    check_combine_bytes,
    check_min_bytes,
    check_room,
    chosen,
    in_words,
    shown,
    why_no_rows,
    why_not_served,
)


@dataclass(frozen=True, repr=False)
class DataParallel:
    """Divides the samples of a batch among the devices along the axis; every variable is replicated.

    The loss keeps its meaning over the global batch; gradients are all-reduced.

    **Arguments:** `overrides`, `combine_bytes`: as of `Hybrid`.
    """

    overrides: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    combine_bytes: int | None = None

    def __post_init__(self) -> None:
        check_combine_bytes(self.combine_bytes)

    def __repr__(self) -> str:
        return shown(self)

    @property
    def splits_batch(self) -> bool:
        """True."""
        return True

    def place(self, model: Model, axis: Axis, taken: Mapping[str, Layout]) -> dict[str, Choice]:
        """Chooses `Replicated`, unless an override says otherwise. **Raises:** as `Hybrid.place`."""
        replicated = Choice(Replicated(), "data parallel: gradient all-reduced")
        return chosen(self.overrides, "data parallel", model, lambda path: replicated)


@dataclass(frozen=True, repr=False)
class FullySharded:
    """Divides the samples like `DataParallel`, and every variable, its gradient and what the optimizer keeps of it.

    A weight is gathered where the loss uses it, within a loop over layers one layer at a time; its gradient is summed
    and scattered at once (ZeRO 3, FSDP). Beside an axis with `DataParallel` that is hybrid sharding.

    **Arguments:** `overrides`: as of `Hybrid`; `Gathered(dim)` pads a dim that the axis does not divide, which stays
    whole otherwise, and `Gathered(dim, "kept")` gathers once for both passes. `min_bytes`: what has fewer where it is
    used stays whole: gathering it takes longer than its memory is worth. `machine`: of `measure_machine`, or with
    published figures: in place of `min_bytes` each variable then is gathered for either pass, gathered once and kept,
    or lies whole, whatever of these takes the fewest seconds of a step. `memory_bytes`: what variables may take of a
    device's memory by that choice, with gradients, optimizer's state and what is made of them for a moment or kept;
    activations come on top. None: all that the machine has, if that is known.

    **Raises:** `ArgumentError` for sizes below zero, and for `memory_bytes` without a `machine`.
    """

    overrides: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    min_bytes: int = 64 << 10
    _: KW_ONLY
    machine: Machine | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        check_min_bytes(self.min_bytes)
        check_room(self.memory_bytes, self.machine)

    def __repr__(self) -> str:
        return shown(self)

    @property
    def splits_batch(self) -> bool:
        """True."""
        return True

    def place(self, model: Model, axis: Axis, taken: Mapping[str, Layout]) -> dict[str, Choice]:
        """Chooses `Gathered` on the first dim that the axis divides and no loop takes apart.

        **Raises:** as `Hybrid.place`.
        """
        choices = {path: self._choice(model, path, model.sites.get(path, ()), axis, taken[path]) for path in taken}
        if self.machine is None:
            return chosen(self.overrides, "fully sharded", model, choices.__getitem__)
        prices, room = Prices(model, axis, taken, self.machine), self.memory_bytes or self.machine.memory_bytes
        by = by_cost(model, prices, choices, {}, {}, self.overrides, room)

        def choose(path: str) -> Choice:
            choice, seconds = choices[path], by.seconds.get(path)
            if not by.words.get(path):  # it can lie in one way only
                return replace(choice, exposed_seconds=seconds)
            placement, told = placed(choice, by.kinds[path])
            return Choice(placement, f"fully sharded: {told}; {by.words[path]}", exposed_seconds=seconds)

        return chosen(self.overrides, "fully sharded", model, choose)

    def _choice(self, model: Model, path: str, sites: Sequence[Site], axis: Axis, taken: Layout) -> Choice:
        spec = model.variables[path]
        dims = [at for at in range(len(spec.shape)) if all(at in site.value.entry.dims for site in sites)]
        if taken.pieces is not None:
            dims.remove(taken.pieces.dim)
        size = bytes_where_used(model, path)
        if taken.is_fed:
            how = "by rows" if taken.by_rows else "served"
            return Choice(Replicated(), f"fully sharded: {how} along another axis")
        if any(site.role == "rows" for site in sites):
            dims = [*dims[1:], *dims[:1]]  # rows in parts are looked up where they lie
        even = [dim for dim in dims if spec.shape[dim] % (taken.num_parts(dim) * axis.size) == 0]
        even.sort(key=taken.num_parts)  # what no axis splits comes first
        is_long = size >= self.min_bytes if self.machine is None else size > 0
        if axis.size > 1 and is_long and even:
            return Choice(Gathered(even[0]), "fully sharded: gathered where it is used, gradient scattered")
        told = f"{in_words(size)} where it is used"
        if is_long and axis.size > 1:
            told = (
                f"no dim of it is a multiple of {axis.size} in each part ({model.no_padding or 'Gathered(dim) pads'})"
            )
        return Choice(Replicated(), f"fully sharded: {told}: whole, gradient all-reduced")


@dataclass(frozen=True, repr=False)
class Hybrid:
    """Divides the samples like `DataParallel`, and decides for each variable how its gradient is synchronized.

    A table that the loss reads by rows only is split by `Rows`, and the rows that a step touches are exchanged, where
    that moves fewer bytes than its whole gradient (Parallax, EuroSys 2019, section 3); everything else is replicated
    and its gradient all-reduced, or lies as `dense` says.

    **Arguments:** `dense`: places what is not split by rows, such as `FullySharded()`. `overrides`: placements by
    pattern of the variable's path, such as `{"params/embed*": Replicated()}` (`fnmatch`); the first that matches
    counts. `row_optimizers`: what moves the rows of tables, by pattern, such as `{"params/embed*":
    row_adagrad(0.1)}`; the optimizer of the step moves all others. `touched`: what `measure_touched` has counted of
    tables, by path; where it is given it decides in place of the upper bound that is known without data, and the
    room for rows follows it. `out_of_range`: what becomes of ids that no row has. "as jax": what the loss says
    (`jnp.take(mode=…)`: clipped, filled or promised not to come), the same on every device. "raise": `DataError`
    some updates later. `combine_bytes`: all-reduces are put together up to this size, the `bucket_cap` of other
    frameworks; None leaves it to the compiler (GPUs; the CPU's always makes one). `tables`: who has the tables. "rows":
    the devices. "servers": those that `parallelize` is given, in their host memory, where they also move the rows
    (parameter servers); `Served(staleness=1)` also says how late.
    """

    overrides: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    dense: Strategy = field(default_factory=lambda: DataParallel())
    row_optimizers: Mapping[str, RowOptimizer] = field(default_factory=dict[str, RowOptimizer])
    touched: Mapping[str, Touched] = field(default_factory=dict[str, Touched])
    out_of_range: Literal["as jax", "raise"] = "as jax"
    combine_bytes: int | None = None
    tables: Literal["rows", "servers"] | Served = "rows"

    def __post_init__(self) -> None:
        check_combine_bytes(self.combine_bytes)
        if not isinstance(self.tables, Served) and self.tables not in ("rows", "servers"):
            raise ArgumentError(f'tables={self.tables!r}: expected "rows", "servers" or parallel.Served(…)')
        if self.out_of_range not in ("as jax", "raise"):
            raise ArgumentError(f'out_of_range={self.out_of_range!r}: expected "as jax" or "raise"')

    def __repr__(self) -> str:
        return shown(self)

    @property
    def splits_batch(self) -> bool:
        """True."""
        return True

    def place(self, model: Model, axis: Axis, taken: Mapping[str, Layout]) -> dict[str, Choice]:
        """Chooses `Rows`, or `Served`, where that is possible and moves fewer bytes, else what `dense` chooses.

        **Raises:** `ArgumentError` when an override names nothing, or asks for what cannot be: rows of what is not read
        by rows, a dim that a loop takes apart.
        """
        dense = self.dense.place(model, axis, taken)
        return chosen(
            self.overrides, "hybrid", model, lambda path: self._choice(model, path, axis, taken[path], dense[path])
        )

    def _choice(self, model: Model, path: str, axis: Axis, taken: Layout, dense: Choice) -> Choice:
        touched = self.touched.get(path)
        alpha = None if touched is None else touched.alpha
        split = taken.moving or (taken.shape and taken.kept_axes(0) and not taken.by_rows)
        cannot = "split along another axis" if split else why_no_rows(model, path)
        num_rows, parts = (*taken.shape, 0)[0], axis.size * (taken.num_parts(0) if taken.shape else 1)
        if not cannot and model.no_padding and num_rows % parts:
            cannot = f"{parts} devices do not divide its {num_rows:,} rows, and {model.no_padding}"
        if not cannot and self.tables != "rows":
            cannot = why_not_served(model, taken)
        if cannot:
            if isinstance(dense.placement, Replicated):
                return replace(dense, why=f"hybrid: {cannot}: gradient all-reduced", alpha=alpha)
            return replace(dense, alpha=alpha)
        costs = costs_of(model, path, touched)
        seen = "" if touched is None else f"; {touched}"
        why = f"hybrid: {model.uses[path].why}{seen}; {costs.words}"
        if costs.by_rows < costs.whole:
            by_word: dict[str, Placement] = {"rows": Rows(), "servers": Served()}
            placement = self.tables if isinstance(self.tables, Served) else by_word[self.tables]
            return Choice(placement, why, alpha, costs.sent, num_rows=costs.num_rows)
        return replace(dense, why=why, alpha=alpha)
