"""The model: seconds of a step, and bytes that a device holds and sends, of many candidates at once."""

from typing import Any, NamedTuple

import numpy as np

from .candidates import FULLY_SHARDED, ROTATED, TENSOR, Candidates
from .cluster import Cluster


class Workload(NamedTuple):
    """A traced program in a few numbers, of the whole batch on one device.

    **Fields:** `flops`: of a step, forward and backward. `variable_bytes`, `state_bytes`: of variables, and of what the
    optimizer keeps. `activation_bytes`: at the peak. `summed_bytes`: of what tensor parallel products sum, forward and
    backward. `num_messages`: variables that are taken in a run of the loss. `frozen_bytes`: of those with no gradient.
    """

    flops: float
    variable_bytes: float
    state_bytes: float
    activation_bytes: float
    summed_bytes: float = 0.0
    num_messages: int = 1
    frozen_bytes: float = 0.0


class Predicted(NamedTuple):
    """What candidates take. **Fields:** float `[n]` each: a step's `seconds`; `memory_bytes`, `sent_bytes` a device."""

    seconds: Any
    memory_bytes: Any
    sent_bytes: Any


def predict(many: Candidates, work: Workload, cluster: Cluster) -> Predicted:
    """Predicts what each candidate takes.

    Seconds are those of products (`flops / devices`, at the cluster's rate), of messages that these do not hide, and
    what each microbatch takes besides. Along an axis of `N`, with `B` bytes of a variable where it is used: an
    all-reduce sends `2 B (N - 1) / N`; what is gathered, or goes around a ring, three times `B (N - 1) / N` in each
    microbatch (ZeRO, arXiv 1910.02054, section 7); tensor parallel products sum their results. An axis whose devices
    do not all lie in one host has the link between hosts; the last axis is the innermost.
    """
    sizes = many.sizes.astype(float)
    tensor = np.where(many.kinds == TENSOR, sizes, 1).prod(1)
    moving = (many.kinds == FULLY_SHARDED) | (many.kinds == ROTATED)
    moved = np.where(moving, sizes, 1).prod(1)
    parts = sizes.prod(1) / tensor
    used = work.variable_bytes / tensor
    again = np.where(moved > 1, many.microbatches, 1)
    computing = work.flops / sizes.prod(1) / cluster.flops_per_second
    sent, exposed = np.zeros(len(sizes)), np.zeros(len(sizes))
    inner = np.ones(len(sizes))
    per_host = cluster.devices_per_host or cluster.devices
    gradients = 1 - work.frozen_bytes / work.variable_bytes if work.variable_bytes else 0.0
    for axis in reversed(range(len(many.axes))):
        size, kind = sizes[:, axis], many.kinds[:, axis]
        others = (size - 1) / size
        whole = 2 * gradients * used / moved * others * again
        taken = (2 + gradients) * used * others * many.microbatches
        summed = work.summed_bytes / parts * others
        is_moving = moving[:, axis]
        here = np.select([kind == TENSOR, is_moving, size > 1], [summed, taken, whole], 0.0)
        count = np.select([kind == TENSOR, is_moving], [4.0, 3.0 * work.num_messages], 2.0)
        count = np.where(size > 1, count * np.where(is_moving | (kind == TENSOR), many.microbatches, again), 0.0)
        count = np.where(kind == ROTATED, count * (size - 1), count)
        link = cluster.inside, cluster.between or cluster.inside
        far = inner * size > per_host
        rate = np.where(far, link[1].bytes_per_second, link[0].bytes_per_second)
        seconds = here / rate + count * np.where(far, link[1].latency_seconds, link[0].latency_seconds)
        hidden = np.where(far, link[1].hidden, link[0].hidden) * (kind != TENSOR)
        exposed += seconds - hidden * np.minimum(seconds, computing)
        sent += here
        inner = inner * size
    kept = (work.variable_bytes * (1 + gradients) + work.state_bytes) / tensor / moved
    memory = kept + work.activation_bytes / parts / tensor / many.microbatches
    return Predicted(computing + exposed + cluster.step_seconds * many.microbatches, memory, sent)
