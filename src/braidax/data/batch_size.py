"""How many samples a batch has. One rule, for all loaders.

`batch_size` counts the samples of the **global** batch: those of all devices, of all processes and of all microbatches.
It is a multiple of the parts into which `specs` split dim 0, times the microbatches. Left out, it is the largest such
multiple up to 128, or else the smallest; where the last samples would be dropped, no more than the source has.
"""

import logging

from braidax.data.sampling.order import Remainder
from braidax.errors import ArgumentError, SpecError

_log = logging.getLogger("braidax")
_USUAL = 128


def chosen_batch_size(
    batch_size: int | None, num_samples: int, remainder: Remainder, *, parts: int, microbatches: int | None
) -> int:
    """Returns the batch size that is meant.

    **Arguments:** `batch_size`: as given. `num_samples`: of the source. `parts`: into which dim 0 of one microbatch is
    split. `microbatches`: None for batches that are no stacks.

    **Raises:** `ArgumentError` for what is no number of samples; `SpecError` where a stack cannot be split so.
    """
    unit = parts * (microbatches or 1)
    if batch_size is None:
        size = max(_USUAL // unit, 1) * unit
        if remainder == "drop" and num_samples < size:
            size = max(num_samples // unit, 1) * unit
        _log.warning("DataLoader: batch_size was not given; using %d (a multiple of the %d parts of dim 0)", size, unit)
        return size
    if not hasattr(batch_size, "__index__") or isinstance(batch_size, bool) or batch_size < 1:
        raise ArgumentError(f"batch_size={batch_size!r} is not a positive number of samples, over all devices")
    if microbatches is not None and parts > 1 and batch_size % microbatches == 0 and batch_size % unit:
        below = batch_size // unit * unit
        raise SpecError(
            f"batch_size={batch_size} is not a multiple of {unit}: specs split dim 0 of each of the "
            f"microbatches={microbatches} into {parts} parts; use {f'{below} or ' if below else ''}{below + unit}"
        )
    return int(batch_size)
