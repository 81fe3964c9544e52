"""A loss that is not cut, as a plan compares a pipeline with it."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from braidax.program import Program, Stage

from .cut import CutLoss
from .segments import drawn
from .verdict import WholeLoss

_MOST_RUNS, _ENOUGH_SECONDS = 4, 1.0


def whole_loss(
    found: CutLoss, share: Callable[[], Program] | None, *, bytes_per_parameter: float, params: int = 0
) -> WholeLoss:
    """Returns what the uncut loss takes: of a microbatch the sum of what its stages take.

    **Arguments:** `share`: traces the loss on what a device has of a batch, to be timed as one program; None where that
    is not to be. `bytes_per_parameter`: with gradient and optimizer's state. `params`: of the argument that is trained.
    """
    sizes = _sizes(found.stages, params)
    frozen = {leaf.number for one in found.stages for leaf in one.leaves if leaf.frozen}
    return WholeLoss(
        sum(one.total for one in found.seconds),
        None if share is None else seconds_of(share(), params=params, frozen=frozen),
        sum(found.activation_bytes),
        sum(size for size, _ in sizes),
        sum(count for _, count in sizes),
        max((math.ceil(size / count) for size, count in sizes), default=0),
        bytes_per_parameter,
    )


def seconds_of(program: Program, *, params: int = 0, frozen: Collection[int] = ()) -> float:
    """Returns how long a loss and its gradient take on the first device, compiled as one program.

    Of some runs the shortest counts; there are fewer of long ones. Values are drawn at random.

    **Arguments:** `params`: of the argument that is trained, but for its leaves that are `frozen`, by number among all.
    """

    def run(leaves: Sequence[Any]) -> Any:
        def loss(moved: dict[int, Any]) -> Any:
            return program(*structure.unflatten([moved.get(at, leaf) for at, leaf in enumerate(leaves)]))

        return jax.value_and_grad(loss, has_aux=True)({at: leaves[at] for at in trained})

    first, count = (len(jax.tree.leaves(one)) for one in (program.in_specs[:params], program.in_specs[params]))
    trained = [at for at in range(first, first + count) if at not in frozen]
    moved, structure = jax.tree.flatten(drawn(program.in_specs))
    compiled = jax.jit(run)
    jax.block_until_ready(compiled(moved))
    taken: list[float] = []
    while len(taken) < _MOST_RUNS and sum(taken) < _ENOUGH_SECONDS:
        begun = time.perf_counter()
        jax.block_until_ready(compiled(moved))
        taken.append(time.perf_counter() - begun)
    return min(taken)


def _sizes(stages: Sequence[Stage], params: int) -> list[tuple[int, int]]:
    """Returns the bytes of each parameter, and in how many parts a loop takes it where it is cut between iterations."""
    found: dict[str, dict[Any, int]] = {}
    for stage in stages:
        for leaf in stage.leaves:
            if leaf.argument == params:
                found.setdefault(leaf.name, {})[leaf.rows] = leaf.num_bytes
    sizes: list[tuple[int, int]] = []
    for own in found.values():
        if None in own:  # whole, perhaps by several stages
            sizes.append((own[None], 1))
        else:
            sizes.append((sum(own.values()), sum(rows[1] - rows[0] for rows in own)))
    return sizes
