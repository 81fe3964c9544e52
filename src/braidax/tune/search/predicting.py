"""The model: seconds of a step, and bytes that a device holds and sends, of many candidates at once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .candidates import Candidates
from .cluster import Cluster
from .roles import DATA, FULLY_SHARDED, HALVED, HYBRID, INTERLEAVED, ROTATED, STAGES, TENSOR
from .splitting import Splits, along
from .workload import Workload

SUMMED = (DATA, HYBRID)
"""Roles of axes over which gradients are summed whole."""

NUM_PROGRAMS = 2.0
"""Of a step without stages: gradients, and apply."""


class Predicted(NamedTuple):
    """What candidates take. **Fields:** float `[n]` each: a step's `seconds`; `memory_bytes`, `sent_bytes` a device."""

    seconds: Any
    memory_bytes: Any
    sent_bytes: Any


def predict(many: Candidates, work: Workload, cluster: Cluster) -> Predicted:
    """Predicts what each candidate takes.

    Seconds are those of products (`flops / devices`, at the cluster's rate), of messages that these do not hide, of the
    optimizer's update, which reads and writes all that a device keeps, and what each microbatch takes besides. Along an
    axis of `N`, with `B` bytes of a variable where it is used: an all-reduce sends `2 B (N - 1) / N`; what is gathered,
    or goes around a ring, three times `B (N - 1) / N` in each microbatch (ZeRO, arXiv 1910.02054, section 7); tensor
    parallel products sum their results, and what these do not split each device has and computes whole; rows of tables
    go there and back, once forward and once as gradients (Parallax, EuroSys 2019, section 3). `P` stages compute a
    batch of `m` microbatches in the time of `m + P - 1` of them, of which interleaving two stages a device spares half
    of what comes on top (Narayanan et al., SC 2021, section 2.2), and gradients of weights that wait two thirds (Qi et
    al., ICLR 2024, table 1). An axis whose devices do not all lie in one host has the link between hosts; the last axis
    is the innermost.
    """
    laid = _laid_out(many, work)
    fill = _bubble(many, laid.stages)
    computing = work.flops * laid.tensor.size / laid.tensor.flops / laid.sizes.prod(1) / cluster.flops_per_second
    sent, exposed, inner = np.zeros(len(laid.sizes)), np.zeros(len(laid.sizes)), np.ones(len(laid.sizes))
    per_host = cluster.devices_per_host or cluster.devices
    for axis in reversed(range(len(many.axes))):
        size, kind = laid.sizes[:, axis], many.kinds[:, axis]
        here, count = _sent(many, work, laid, axis)
        links = [cluster.between or cluster.inside, cluster.sums or cluster.inside, cluster.inside]
        taken = [inner * size > per_host, np.isin(kind, SUMMED), np.ones(len(size), bool)]
        rate = np.select(taken, [link.bytes_per_second for link in links])
        latency = np.select(taken, [link.latency_seconds for link in links])
        hidden = np.select(taken, [link.hidden for link in links]) * (kind != TENSOR)
        seconds = here / rate + count * latency
        one_way = work.cut_bytes / laid.parts / many.microbatches / rate + latency
        waits = np.where(np.isin(kind, STAGES), 2 * (size - 1) * one_way, 0.0)  # the first one, and the last one back
        exposed += np.maximum(waits, seconds - hidden * np.minimum(seconds, computing))
        sent += here
        inner = inner * size
    longer = (many.microbatches + fill) / many.microbatches
    over = cluster.overheads
    besides = over.step_seconds * (many.microbatches + fill) + over.program_seconds * _num_programs(many)
    if over.update_bytes_per_second is not None:
        besides = besides + _touched(work, laid) / over.update_bytes_per_second
    seconds = computing * longer + exposed + besides
    return Predicted(seconds, _memory(many, work, laid), sent)


class _Laid(NamedTuple):
    """How candidates divide variables. **Fields:** of each the `sizes` of its axes; among how many `parts` samples are
    divided, and variables by rings, by gathering (`sharded`), by either (`moved`), by rows, by stages; `tensor`: among
    how many devices products divide variables, activations and flops; bytes of `tables` by rows; the part `gradients`
    of all others that have one, and the part of them that is `gathered` where it is used.
    """

    sizes: Any
    parts: Any
    tensor: Splits
    rings: Any
    sharded: Any
    moved: Any
    by_rows: Any
    stages: Any
    tables: Any
    gradients: float
    gathered: Any


def _laid_out(many: Candidates, work: Workload) -> _Laid:
    sizes, kinds = many.sizes.astype(float), many.kinds
    roles = [kinds == one for one in (TENSOR, ROTATED, FULLY_SHARDED, HYBRID)] + [np.isin(kinds, STAGES)]
    tensor, rings, sharded, by_rows, stages = (np.where(one, sizes, 1).prod(1) for one in roles)
    by_rows = np.where(rings > 1, 1, by_rows)  # a ring has parts of tables, too
    gradients = 1 - work.frozen_bytes / work.variable_bytes if work.variable_bytes else 0.0
    tables, parts = np.where(by_rows > 1, work.table_bytes, 0.0), sizes.prod(1) / tensor / stages
    gathered, moved = _by_size(work.gathered, sharded), rings * sharded
    divided = _divided(work, tensor)
    return _Laid(sizes, parts, divided, rings, sharded, moved, by_rows, stages, tables, gradients, gathered)


def _by_size(known: Sequence[tuple[int, float]], sizes: Any) -> Any:
    """Returns a part that is known by the size of an axis: all where it is not known, none on one device."""
    every, at = np.unique(sizes.astype(int), return_inverse=True)
    return np.array([dict(known).get(int(size), 1.0) if size > 1 else 0.0 for size in every])[at]


def _divided(work: Workload, size: Any) -> Splits:
    """Returns among how many devices products divide what a device has: as many as the axis has, where all is split."""
    found = along(work.splits, size)
    summed = np.where(np.isnan(found.summed_bytes), work.summed_bytes, found.summed_bytes)

    def divided(share: Any) -> Any:
        return 1 / (share / size + 1 - share)

    return Splits(size, divided(found.variables), divided(found.activations), divided(found.flops), summed)


def _sent(many: Candidates, work: Workload, laid: _Laid, axis: int) -> tuple[Any, Any]:
    """Returns the bytes that a device sends along an axis, and in how many messages."""
    size, kind, pieces = laid.sizes[:, axis], many.kinds[:, axis], many.microbatches
    is_moving, is_cut = (kind == FULLY_SHARDED) | (kind == ROTATED), np.isin(kind, STAGES)
    others, chunks = (size - 1) / size, np.where(kind == INTERLEAVED, 2, 1)
    used = (work.variable_bytes - laid.tables) / laid.tensor.variables / laid.stages
    again = np.where(laid.moved > 1, pieces, 1)
    rows = 2 * work.row_bytes / laid.parts / laid.stages * others * ((kind == HYBRID) & (laid.by_rows > 1))
    whole = 2 * laid.gradients * used / laid.moved * others * again + rows
    taken = (2 + laid.gradients) * used * others * pieces
    summed = laid.tensor.summed_bytes / laid.parts / laid.stages * others
    handed = 2 * work.cut_bytes / laid.parts * (chunks - 1 / size)
    here = np.select([is_cut, kind == TENSOR, is_moving, size > 1], [handed, summed, taken, whole], 0.0)
    count = np.select([is_cut, kind == TENSOR, is_moving], [2.0 * chunks, 4.0, 3.0 * work.num_messages], 2.0)
    count = np.where(size > 1, count * np.where(is_cut | is_moving | (kind == TENSOR), pieces, again), 0.0)
    return here, np.where(kind == ROTATED, count * (size - 1), np.where(kind == HYBRID, 2 * count, count))


def _memory(many: Candidates, work: Workload, laid: _Laid) -> Any:
    """Returns the bytes that a device holds at the peak, in the gradients' program.

    Variables, their gradients and what the optimizer keeps are there all the time; tables by rows have no gradient of
    their size. Beside them lies whichever is more: the activations, or what collectives read while they write, which
    is gradients before they are summed, what is gathered, and the parts that come around a ring. Microbatches add
    gradients up beside activations, and beside what collectives read: of sharded ones the sum before and behind each.
    Where tables are divided by rows and by tensor parallel, sums take as much as microbatches spare.
    Rows of tables are there as they come, as they are used, and both ways again as gradients.
    """
    own, given, kept = _kept(work, laid)
    pieces, share = many.microbatches, _in_tables(work, laid)
    part = _part(laid)
    tables = (laid.tables + work.state_bytes * share) / laid.by_rows / laid.tensor.variables
    rows = np.where(laid.by_rows > 1, 4 * work.row_bytes / laid.parts, 0.0)
    spared = np.where((laid.by_rows > 1) & (laid.tensor.size > 1), 1, pieces)
    activations = work.activation_bytes / laid.parts / laid.tensor.activations / spared * _in_flight(many, laid.stages)
    in_tables = np.minimum((work.table_bytes - laid.tables) / laid.tensor.variables, own * laid.rings)
    adds = (pieces > 1) & (laid.parts > 1) & (laid.stages == 1)  # stages add up in place
    added = np.where(adds, given * part + in_tables * laid.gradients, 0.0)
    gathered = laid.gathered * (own + (own - in_tables / laid.rings) * laid.gradients * (1 - 1 / laid.sharded))
    coming = np.where(laid.rings > 1, own + given, 0.0)
    sums = np.select([laid.sharded > 1, laid.rings > 1], [2.0, 1.0], 0.0) * (pieces > 1) * given * part
    summed = np.where(laid.parts > 1, given * (1 - laid.gathered), 0.0) + gathered + coming + sums
    return ((own + given + kept) * part + tables + rows + np.maximum(activations + added, summed)) / laid.stages


def _touched(work: Workload, laid: _Laid) -> Any:
    """Returns the bytes that a device reads and writes in an update. Of tables by rows these are few: none."""
    _, given, kept = _kept(work, laid)
    return (3 * given + 2 * kept) * _part(laid) / laid.stages


def _part(laid: _Laid) -> Any:
    """Returns which part of what could be sharded lies on a device."""
    return 1 - laid.gathered + laid.gathered / laid.sharded


def _kept(work: Workload, laid: _Laid) -> tuple[Any, Any, Any]:
    """Returns the bytes of variables, of their gradients, and of what the optimizer keeps, all but tables by rows,
    where nothing is sharded."""
    held = laid.tensor.variables * laid.rings
    own = (work.variable_bytes - laid.tables) / held
    return own, own * laid.gradients, work.state_bytes * (1 - _in_tables(work, laid)) / held


def _in_tables(work: Workload, laid: _Laid) -> Any:
    """Returns the part of all variables that tables by rows are."""
    return laid.tables / work.variable_bytes if work.variable_bytes else 0.0


def _bubble(many: Candidates, stages: Any) -> Any:
    """Returns for how many microbatches' time a stage has nothing to do, while others are filled and drained."""
    interleaved, halved = ((many.kinds == one).any(1) for one in (INTERLEAVED, HALVED))
    return (stages - 1) / np.select([interleaved, halved], [2.0, 3.0], 1.0)


def _num_programs(many: Candidates) -> Any:
    """Returns how many programs a step has, each on all devices, of which several may share one: gradients and apply.
    Stages run each microbatch forward and backward, where they interleave twice as often, and apply once."""
    interleaved, halved, cut = ((np.isin(many.kinds, one)).any(1) for one in (INTERLEAVED, HALVED, STAGES))
    return np.where(cut, many.microbatches * np.select([interleaved, halved], [4.0, 3.0], 2.0) + 1, NUM_PROGRAMS)


def _in_flight(many: Candidates, stages: Any) -> Any:
    """Returns how many microbatches the first stage keeps activations of at once."""
    ahead = np.where((many.kinds == INTERLEAVED).any(1), stages + (stages - 1) / 2, stages)
    return np.minimum(many.microbatches, ahead)
