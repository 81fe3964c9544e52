"""What a plan asks of the compiler of the devices that it is carried out on, and why."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    CompilerOption(
        "xla_gpu_enable_pipelined_all_reduce", True, "a loop sums a layer's gradients while it computes the next one's"
    ),
)


def keeps_order(platform: str) -> bool:
    """Returns whether a platform's compiler lets a program say what is computed behind what; that for CPUs does not."""
    return platform != "cpu"


class Sizes(NamedTuple):
    """Bytes of weights. **Fields:** of the `layer` that a loop uses in a turn, and the `longest` outside of loops."""

    layer: int = 0
    longest: int = 0


_NO_SIZES = Sizes()


def options_that_hide(
    platform: str, variables: Sequence[tuple[Layout, int]], gathered: Sizes = _NO_SIZES, whole: Sizes = _NO_SIZES
) -> tuple[CompilerOption, ...]:
    """Returns the options with which a platform's compiler hides what is sent for variables; for GPUs there are such.

    **Arguments:** `variables`: how each lies, and its bytes. `gathered`, `whole`: sizes of those that are.
    """
    if platform != "gpu":
        return ()
    bytes_gathered = sum(size for layout, size in variables if layout.gathered)
    bytes_whole = sum(size for layout, size in variables if not layout.moving and not layout.by_rows)
    options = (
        *(_GATHERED_EARLY if bytes_gathered else ()),
        *(_SUMMED_EARLY if bytes_whole > bytes_gathered else ()),
    )
    sizes = gathered if bytes_gathered >= bytes_whole else whole
    if sizes.longest > sizes.layer > 0:
        options = (*options, _SEVERAL)
    if gathered.layer == 0:
        return options
    why = "the weights of one layer are gathered together"
    return (*options, CompilerOption("xla_gpu_all_gather_combine_threshold_bytes", gathered.layer, why))


def sizes_of(layouts: Mapping[str, Layout], sites: Mapping[str, Sequence[Site]]) -> Sizes:
    """Returns the sizes of variables, of the loop whose turns use most of them.

    **Arguments:** by path, how they lie, and where they are used.
    """
    levels: defaultdict[Path, dict[str, int]] = defaultdict(dict)
    longest = 0
    for path, layout in layouts.items():
        for value in (site.value for site in sites.get(path, ())):
            dtype = aval_of(value.casts[-1].outvars[0]).dtype if value.casts else value.entry.dtype
            size = math.prod(layout.shape[dim] for dim in value.entry.dims) * np.dtype(dtype).itemsize
            if value.entry.lengths:
                levels[value.entry.level][path] = size
            else:
                longest = max(longest, size)
    return Sizes(max((sum(sizes.values()) for sizes in levels.values()), default=0), longest)
