"""What a plan asks of the compiler of the devices that it is carried out on, and why."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from braidax.program import Path, Site, aval_of

from .layout import Layout


@dataclass(frozen=True)
class CompilerOption:
    """An option that the gradients are compiled with: its `name` and `value` as XLA has them, and `why`."""

    name: str
    value: bool | int
    why: str


_SEVERAL = CompilerOption(
    "xla_gpu_experimental_parallel_collective_overlap_limit", 2, "a long message does not keep others from starting"
)
_GATHERED_EARLY = (
    _SEVERAL,
    CompilerOption(
        "xla_gpu_enable_pipelined_all_gather", True, "a loop gathers the next layer's weights while it uses this one's"
    ),
    CompilerOption(
        "xla_gpu_enable_all_gather_combine_by_dim", True, "what is needed first is not gathered with what has time"
    ),
    CompilerOption(
        "xla_gpu_enable_reduce_scatter_combine_by_dim",
        True,
        "what is there early is not scattered with what is last",
    ),
)
_SUMMED_EARLY = (
    _SEVERAL,
    CompilerOption(
        "xla_gpu_enable_pipelined_all_reduce", True, "a loop sums a layer's gradients while it computes the next one's"
    ),
)


def options_that_hide(
    platform: str, variables: Sequence[tuple[Layout, int]], layer_bytes: int = 0
) -> tuple[CompilerOption, ...]:
    """Returns the options with which a platform's compiler hides what is sent for variables; for GPUs there are such.

    **Arguments:** `variables`: how each lies, and its bytes. `layer_bytes`: of the weights that a loop gathers in a
    turn.
    """
    if platform != "gpu":
        return ()
    gathered = sum(size for layout, size in variables if layout.gathered)
    whole = sum(size for layout, size in variables if not layout.gathered and not layout.by_rows)
    options = (*(_GATHERED_EARLY if gathered else ()), *(_SUMMED_EARLY if whole > gathered else ()))
    if layer_bytes == 0:
        return options
    why = "the weights of one layer are gathered together"
    return (*options, CompilerOption("xla_gpu_all_gather_combine_threshold_bytes", layer_bytes, why))


def largest_layer(layouts: Mapping[str, Layout], sites: Mapping[str, Sequence[Site]]) -> int:
    """Returns the bytes of the weights that a loop gathers in a turn, of the loop that gathers most.

    **Arguments:** by path, how variables lie, and where they are used.
    """
    levels: defaultdict[Path, dict[str, int]] = defaultdict(dict)
    for path, layout in layouts.items():
        for value in (site.value for site in sites.get(path, ()) if layout.gathered and site.value.entry.lengths):
            dtype = aval_of(value.casts[-1].outvars[0]).dtype if value.casts else value.entry.dtype
            size = math.prod(layout.shape[dim] for dim in value.entry.dims)
            levels[value.entry.level][path] = size * np.dtype(dtype).itemsize
    return max((sum(sizes.values()) for sizes in levels.values()), default=0)
