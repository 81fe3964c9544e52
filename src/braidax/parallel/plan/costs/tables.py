"""What a table costs by rows, and whole: the bytes that decide."""

from dataclasses import dataclass

from braidax.parallel.plan.model import Model
from braidax.parallel.plan.strategy import in_words, num_bytes
from braidax.parallel.rows import shared_bytes
from braidax.parallel.rows.exchange.traffic import ID_BYTES
from braidax.parallel.rows.touched import Touched, all_reduced_bytes, rows_bytes

ABSENCE = 1_000
"""So many steps a row of a batch was away, where somebody has to guess: real rows are not equally frequent, and the
longest absence among them grows with the run."""

MEMORY = 16
"""A device moves about so many bytes in its own memory in the time in which it sends one to another."""


@dataclass(frozen=True)
class Costs:
    """Bytes that a device sends in a step. Where there is one device, which sends nothing, those that it moves.

    **Fields:** `by_rows`, `whole`, with what replayed steps cost. `sent`: by rows, without that. `num_rows`: different
    ones that a device reads, at most or as counted. `words`: all of them, and what was counted.
    """

    by_rows: int
    whole: int
    sent: int
    num_rows: float
    words: str


def costs_of(model: Model, path: str, touched: Touched | None) -> Costs:
    """Counts what a variable that is read by rows costs.

    Without `touched`, by rows it is an upper bound: `n (4 + 2 D b)` for the `n` ids of a device, each other's row.
    Rows of ids that all devices share are fetched by one each, all-gathered, and their gradients all-reduced.

    **Arguments:** `touched`: counted on real batches, if they were.
    """
    spec, uses, work = model.variables[path], model.uses[path], model.row_work(path)
    row_bytes = num_bytes(spec) // max(spec.shape[0], 1)
    num_parts = model.num_parts if touched is None else touched.num_parts
    if touched is None:
        num_ids = sum(use.rows.num_ids for use in uses.uses if use.rows is not None) * model.microbatches
        rows, num_shared = float(-(-num_ids // num_parts)), work.num_shared * model.microbatches
    else:
        rows, num_shared = touched.num_unique, touched.num_shared
    if touched is None or num_parts == 1:
        by_rows, whole = rows * (ID_BYTES + 2 * row_bytes), 2.0 * num_bytes(spec)
    else:
        replicas = max(1, model.num_parts // num_parts)
        by_rows = rows_bytes(touched, row_bytes, num_replicas=replicas)
        whole = all_reduced_bytes(touched, row_bytes)
    shared = shared_bytes(num_shared, row_bytes, num_parts)
    by_rows += shared
    sent = round(by_rows)
    does, other = ("sends", "all-reduced") if num_parts > 1 else ("moves", "whole")
    words = f"a device {does} {in_words(round(by_rows))} a step by rows, {in_words(round(whole))} {other}"
    if shared:
        words += f"; {num_shared:,} ids are shared by all devices"
    if arrays := work.num_replayed:
        in_rows = 2 * arrays * row_bytes * rows * ABSENCE / (MEMORY if num_parts > 1 else 1)
        in_whole = 2 * arrays * num_bytes(spec) / (MEMORY if num_parts > 1 else 1)
        words += (
            f"; its optimizer takes missed steps one by one: {ABSENCE:,} of them cost as much as "
            f"{in_words(round(in_rows))} more, those of all rows {in_words(round(in_whole))}"
        )
        by_rows, whole = by_rows + in_rows, whole + in_whole
    num_read = min(rows + num_shared * (num_parts - 1) / num_parts, spec.shape[0])
    return Costs(round(by_rows), round(whole), sent, num_read, words)
