"""Schedules as CSV: a row a device, a column a step of time, a cell an action such as `0F0`, `1B2` or `1W2`.

This is how torch's pipelining prints its schedules: stage, action, microbatch; `I` is a backward of the inputs alone.
"""

import csv
import io
import re

from braidax.errors import ArgumentError
from braidax.parallel.stages.schedules.costs import Costs
from braidax.parallel.stages.schedules.dependencies import Dependencies
from braidax.parallel.stages.schedules.operations import Kind, Operation, Schedule, Weights, with_updates
from braidax.parallel.stages.schedules.simulate import simulate
from braidax.parallel.stages.schedules.validate import validate

_ACTION = re.compile(r"(\d+)(F|B|I|W|U|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def parse_csv(text: str, *, name: str = "CSV", weights: Weights = "flushed") -> Schedule:
    """Reads a schedule and validates it.

    `B` is a whole backward, unless there is a `W` of the same stage and microbatch: then it is one of the inputs. Two
    actions that overlap, `(0F1;1B0)OVERLAP_F_B`, stand one after the other. Updates (`U`) may be left out where
    weights are flushed.

    **Arguments:** `text`: a row a device, the first is device 0. `weights`: which weights microbatches see.

    **Raises:** `ArgumentError` that names row and column, counted from 1, of what is malformed, twice, or waits for
    itself, and what is missing.
    """
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    cells: dict[Operation, str] = {}
    lists = [
        [operation for column, cell in enumerate(row) for operation in _read_cell(cell, number, column, cells)]
        for number, row in enumerate(rows)
    ]
    if not cells:
        raise ArgumentError("the CSV has no action; expected a row a device, with cells such as 0F0, 1B2, 1W2")
    split = {(x.stage, x.microbatch) for x in cells if x.kind is Kind.WEIGHT}
    lists = [[_split(x, split) for x in operations] for operations in lists]
    cells = {_split(operation, split): cell for operation, cell in cells.items()}
    homes = _homes(lists, cells)
    num_microbatches = 1 + max((x.microbatch for x in cells if x.kind is not Kind.UPDATE), default=0)
    num_updates = 1 + max((x.microbatch for x in cells if x.kind is Kind.UPDATE), default=0)
    if num_microbatches % num_updates:
        raise ArgumentError(
            f"the CSV has {num_updates} updates a stage, which do not divide {num_microbatches} microbatches"
        )
    has_updates = any(x.kind is Kind.UPDATE for x in cells)
    done = tuple(map(tuple, lists)) if has_updates else with_updates(lists)
    schedule = Schedule(name, num_microbatches, homes, done, weights, num_microbatches // num_updates)
    try:
        validate(schedule)
    except ArgumentError as error:
        raise ArgumentError(_with_cells(str(error), cells)) from error
    return schedule


def format_csv(schedule: Schedule) -> str:
    """Writes a schedule, each action in the column of the first step of time in which it can be done.

    Where there are sends and receives, columns are places in lists. Updates are written where weights are not flushed.
    """
    has_transfers = any(x.is_transfer for x in schedule.operations())
    columns: dict[Operation, int] = {}
    if not has_transfers:
        simulation = simulate(schedule, Costs.even(schedule.num_stages))
        dependencies, last = Dependencies(schedule), [-1] * schedule.num_devices
        for timed in simulation.in_order():
            needs = [columns[need] for need in dependencies.of(timed.operation)]
            columns[timed.operation] = last[timed.device] = 1 + max([last[timed.device], *needs])
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for operations in schedule.lists:
        row: list[str] = []
        for operation in operations:
            if operation.kind is Kind.UPDATE and schedule.is_flushed:
                continue
            row += [""] * (columns.get(operation, len(row)) - len(row))
            row.append(str(operation))
        writer.writerow(row)
    return out.getvalue()


def _read_cell(cell: str, row: int, column: int, cells: dict[Operation, str]) -> list[Operation]:
    where = f"row {row + 1}, column {column + 1}"
    overlapped = _OVERLAPPED.fullmatch(cell.strip())
    parts = overlapped[1].split(";") if overlapped else [cell] if cell.strip() else []
    operations: list[Operation] = []
    for part in parts:
        found = _ACTION.fullmatch(part.strip())
        if found is None:
            raise ArgumentError(
                f"{where}: {part.strip()!r} is no action; expected stage, one of F B I W U SEND_F RECV_F SEND_B "
                "RECV_B, and microbatch, such as 1B2"
            )
        operation = Operation(Kind(found[2]), int(found[1]), int(found[3]))
        if operation in cells:
            raise ArgumentError(f"{where}: {operation} is there twice, the first is in {cells[operation]}")
        cells[operation] = where
        operations.append(operation)
    return operations


def _split(operation: Operation, split: set[tuple[int, int]]) -> Operation:
    if operation.kind is Kind.BACKWARD and (operation.stage, operation.microbatch) in split:
        return Operation(Kind.INPUT, operation.stage, operation.microbatch)
    return operation


def _homes(lists: list[list[Operation]], cells: dict[Operation, str]) -> tuple[int, ...]:
    homes: dict[int, int] = {}
    for device, operations in enumerate(lists):
        if not operations:
            raise ArgumentError(f"row {device + 1} has no action: device {device} would have no stage")
        for operation in operations:
            if homes.setdefault(operation.stage, device) != device:
                raise ArgumentError(
                    f"{cells[operation]}: {operation} is in the wrong row, stage {operation.stage} is in row "
                    f"{homes[operation.stage] + 1}"
                )
    for stage in range(max(homes)):
        if stage not in homes:
            raise ArgumentError(f"no row has an action of stage {stage}, though there is a stage {max(homes)}")
    return tuple(homes[stage] for stage in range(len(homes)))


def _with_cells(message: str, cells: dict[Operation, str]) -> str:
    """Adds where the actions are that a message names."""
    named = dict.fromkeys(
        f"{operation} in {cells[operation]}"
        for found in _ACTION.finditer(message)
        if (operation := Operation(Kind(found[2]), int(found[1]), int(found[3]))) in cells
    )
    missing = re.search(r"missing from device (\d+)", message)
    named |= {f"row {int(missing[1]) + 1}": None} if missing else {}
    return f"{message} ({'; '.join(named)})" if named else message
