"""A loss in the few numbers that candidates are priced by."""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from braidax.errors import ArgumentError
from braidax.parallel import Step
from braidax.parallel.given.initial import trace_init, traced_loss
from braidax.parallel.given.loss import Loss
from braidax.parallel.plan.costs.between import between_of
from braidax.parallel.plan.costs.tables import costs_of
from braidax.parallel.plan.model import Model
from braidax.parallel.plan.strategy import num_bytes, why_no_rows
from braidax.parallel.rows.read_rows import ReadRows
from braidax.program import Chain, Program, cost_of, find_mixing

from .roles import Offered
from .splitting import Splits, gathered_of, splits_of


class Workload(NamedTuple):
    """A traced program in a few numbers, of the whole batch on one device.

    **Fields:** `flops`: of a step, forward and backward. `variable_bytes`, `state_bytes`: of variables, and of what the
    optimizer keeps. `activation_bytes`: at the peak. `summed_bytes`: of what tensor parallel products sum, forward and
    backward. `num_messages`: variables that are taken in a run of the loss. `frozen_bytes`: of those with no gradient.
    `table_bytes`: of those that are read by rows, and pay by rows; `row_bytes`: of what a batch reads of them, at most.
    `cut_bytes`: that go over a place where the loss is narrow; `most_stages`: one more than there are such places.
    `splits`: what tensor parallelism splits, by the size of its axis; all, where an axis is not among them. `gathered`:
    the same of sharding everything, of the bytes of variables.
    """

    flops: float
    variable_bytes: float
    state_bytes: float
    activation_bytes: float
    summed_bytes: float = 0.0
    num_messages: int = 1
    frozen_bytes: float = 0.0
    table_bytes: float = 0.0
    row_bytes: float = 0.0
    cut_bytes: float = 0.0
    most_stages: int = 1
    splits: tuple[Splits, ...] = ()
    gathered: tuple[tuple[int, float], ...] = ()

    @property
    def touched_bytes(self) -> float:
        """What an update reads and writes on one device: variables and what is kept of them twice, gradients once."""
        return 3 * (self.variable_bytes - self.frozen_bytes) + 2 * self.state_bytes

    @property
    def offered(self) -> Offered:
        """Which roles this has a use for."""
        return Offered(self.table_bytes > 0, self.most_stages)


def workload(
    alone: Step,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    given: dict[str, Any],
    *,
    devices: int = 1,
) -> Workload:
    """Traces a loss and compiles its gradients for one device, and returns them in numbers.

    A backward pass has twice the operations of the forward pass.

    **Arguments:** `alone`: the step of one device. `given`: `init` and `batch` of `parallelize`. `devices`: that it is
    searched for.
    """
    born = trace_init(given["init"], Loss(loss_fn))
    program = traced_loss(Loss(loss_fn), born.out_specs, given["batch"], 1, alone.mesh)
    model = ReadRows(program, optimizer, {}, 1, frozenset()).model(1, ())
    variables = alone.plan.variables
    own = sum(one.num_bytes for one in variables)
    state = sum(one.costs.state_bytes or 0 for one in variables)
    frozen = sum(one.num_bytes for one in variables if one.frozen)
    tables, rows = _tables(model)
    cut_bytes, most_stages = _cuts(program)
    flops = cost_of(program.closed.jaxpr).flops
    activations = max(0, alone.compile_for("here").peak_bytes - 2 * own + frozen - state)
    sizes = [size for size in range(2, devices + 1) if devices % size == 0]
    return Workload(
        flops=3 * flops,
        variable_bytes=own,
        state_bytes=state,
        activation_bytes=activations,
        summed_bytes=2 * sum(between_of(model, root).summed for root in model.dims.groups),
        num_messages=max(1, len(variables)),
        frozen_bytes=frozen,
        table_bytes=tables,
        row_bytes=rows,
        cut_bytes=cut_bytes,
        most_stages=most_stages,
        splits=splits_of(model, flops=flops, activation_bytes=activations, sizes=sizes),
        gathered=gathered_of(model, sizes),
    )


def _tables(model: Model) -> tuple[float, float]:
    """Returns the bytes of tables that a step moves fewer bytes of by rows than whole, and of these rows."""
    tables = rows = 0.0
    for path in model.variables:
        if why_no_rows(model, path):
            continue
        costs = costs_of(model, path, None)
        if costs.by_rows < costs.whole:
            tables, rows = tables + num_bytes(model.variables[path]), rows + costs.sent / 2
    return tables, rows


def _cuts(program: Program) -> tuple[float, int]:
    """Returns the bytes that go over a border, half of borders have fewer, and into how many stages there may be."""
    try:
        mixes = any(one.trained for one in find_mixing(program, {len(program.in_specs) - 1: 0}, 0))
        borders = () if mixes else Chain(program).borders()
    except ArgumentError:  # a loss that changes references is one stage
        borders = ()
    return statistics.median([float(one.live_bytes) for one in borders] or [0.0]), len(borders) + 1
