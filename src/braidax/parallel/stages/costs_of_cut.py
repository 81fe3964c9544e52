"""What the operations of a schedule cost, of a loss that is cut into stages."""

from collections.abc import Sequence
from itertools import pairwise

from braidax.parallel.plan.costs.machine import Link
from braidax.program import Stage, bytes_of

from .cut import CutLoss
from .halved import Halved
from .passes import Passes
from .schedules import Costs


def costs_of_cut(
    found: CutLoss, link: Link, *, inner_devices: int = 1, kept_bytes: Sequence[int] | None = None
) -> Costs:
    """Returns the seconds and bytes of each stage's operations, of one microbatch on one device.

    A backward pass that runs its stage again takes that longer. To the next stage go all values of a border, and the
    gradients of those that have any come back, which are no more.

    **Arguments:** `link`: from a stage to the next one. `inner_devices`: that each replica of a stage is of; all divide
    the samples of a microbatch: each has that part of seconds and bytes. `kept_bytes`: of each stage what is left
    between the gradient of its inputs and that of its weights; by default all that its forward pass has left.
    """
    again = [one.forward if rerun else 0.0 for one, rerun in zip(found.seconds, found.recompute, strict=True)]
    parts = [one * inner_devices for one in found.replicas]
    each = list(zip(found.seconds, again, parts, strict=True))
    sent = sent_bytes(found, inner_devices)
    return Costs(
        forward_seconds=tuple(one.forward / count for one, _, count in each),
        input_seconds=tuple((one.inputs + more) / count for one, more, count in each),
        weight_seconds=tuple(one.weights / count for one, _, count in each),
        transfer_seconds=tuple(map(link.seconds, sent)),
        activation_bytes=tuple(map(_share, found.activation_bytes, parts)),
        kept_bytes=None if kept_bytes is None else tuple(map(_share, kept_bytes, parts)),
    )


def bytes_between_halves(found: CutLoss) -> tuple[int, ...]:
    """Returns of each stage what is held of a microbatch between the gradient of its inputs and that of its weights.

    It may be more than the forward pass has left: operands and cotangents of products. Stages that compute the same
    are traced once.
    """
    known: dict[tuple[str, bool], int] = {}
    sizes: list[int] = []
    for stage, again in zip(found.stages, found.recompute, strict=True):
        key = stage.told(), again
        if key not in known:
            known[key] = Halved(Passes(stage, recompute=again)).kept_bytes
        sizes.append(known[key])
    return tuple(sizes)


def sent_bytes(found: CutLoss, inner_devices: int) -> tuple[float, ...]:
    """Returns what goes from each stage to the next one, by way of the busiest device of the two."""
    pairs = zip(found.stages, pairwise(found.replicas), strict=False)
    return tuple(border_bytes(one) / (inner_devices * min(both)) for one, both in pairs)


def border_bytes(stage: Stage) -> int:
    """Returns the bytes of all that a stage sends to the next one for a microbatch."""
    return sum(map(bytes_of, stage.outgoing))


def _share(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
