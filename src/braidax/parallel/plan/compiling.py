"""What a plan asks of the compiler of the devices that it is carried out on, and why."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
_BOTH_AROUND = replace(_SEVERAL, why="a part of a weight goes around, and the sum of its gradient behind it")
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
_V5E = ("TPU v5 lite", "TPU v5e")  # v5p and v6e were seen to begin no gather early, with these options either
_GATHERED_UNDER_PRODUCTS = (
    CompilerOption(
        "xla_latency_hiding_scheduler_enable_selective_resources", True, "a message is not put where nothing hides it"
    ),
    CompilerOption("xla_lhs_make_all_gather_selective", True, "a weight is gathered while matrices are multiplied"),
)
_GATHERED_A_TURN_EARLIER = (
    CompilerOption(
        "xla_tpu_enable_ici_ag_pipelining", True, "a loop gathers the next layer's weights while it uses this one's"
    ),
    CompilerOption(
        "xla_tpu_max_ag_pipelining_per_loop", 2, "a layer's first weights; before others it has products of its own"
    ),
)
_SUMMED_EARLY = (
    CompilerOption(
        "xla_gpu_enable_pipelined_all_reduce", True, "a loop sums a layer's gradients while it computes the next one's"
    ),
)

_FEWEST_BYTES, _MOST_BYTES = 2**20, 30 * 2**20
"""Messages shorter than the first are not worth one of their own; XLA makes none that is longer than the second."""


def keeps_order(platform: str) -> bool:
    """Returns whether a platform's compiler lets a program say what is computed behind what; that for CPUs does not."""
    return platform != "cpu"


class RingForm(NamedTuple):
    """How rings of weights are written for a compiler.

    **Fields:** `unroll`: how many turns of a ring, of its backward pass where hops are ahead, one turn of its loop
    takes: compilers copy what a loop hands on. `keeps_wide`: weights are hidden from a compiler that would copy those
    of all layers, in a narrower type, before it loops over these. `lets_last_move`: the last gradient of the weights
    that are used last waits for nothing, so that it is made while what comes later is sent. `in_place`: a part is
    handed on when it has been used, and no work is under a hop. `least_bytes`: parts of fewer are, in loops, taken two,
    four, … at once, as devices meet more slowly than they copy. `in_order`: gradients are made in the order of a
    weight's dims, for a compiler that turns what it multiplies. `keeps`: a short product of the weights that are used
    last is not computed again.
    """

    unroll: int = 1
    keeps_wide: bool = False
    lets_last_move: bool = False
    in_place: bool = False
    least_bytes: int = 0
    in_order: bool = False
    keeps: bool = False


_RING_FORMS = {
    "tpu": RingForm(unroll=2, keeps_wide=True),
    "gpu": RingForm(lets_last_move=True),
    "cpu": RingForm(unroll=2, in_place=True, least_bytes=2**20, in_order=True, keeps=True),
}


def ring_form(platform: str) -> RingForm:
    """Returns how rings are written for the compiler of a platform."""
    return _RING_FORMS.get(platform, RingForm())


class Sizes(NamedTuple):
    """Bytes of weights. **Fields:** of the `layer` that a loop uses in a turn, and the `longest` outside of loops."""

    layer: int = 0
    longest: int = 0


_NO_SIZES = Sizes()


def options_that_hide(
    platform: str,
    variables: Sequence[tuple[Layout, int]],
    gathered: Sizes = _NO_SIZES,
    whole: Sizes = _NO_SIZES,
    *,
    device_kind: str = "",
) -> tuple[CompilerOption, ...]:
    """Returns the options with which a platform's compiler hides what is sent for variables.

    For GPUs and some TPUs there are such.

    **Arguments:** `variables`: how each lies, and its bytes. `gathered`, `whole`: sizes of those that are.
    `device_kind`: as JAX has it.
    """
    bytes_gathered = sum(size for layout, size in variables if layout.gathered)
    if platform == "tpu" and device_kind in _V5E and bytes_gathered:
        return (*(_GATHERED_A_TURN_EARLIER if gathered.layer else ()), *_GATHERED_UNDER_PRODUCTS)
    if platform != "gpu":
        return ()
    bytes_whole = sum(size for layout, size in variables if not layout.moving and not layout.is_fed)
    options = (
        *(_GATHERED_EARLY if bytes_gathered else ()),
        *(_SUMMED_EARLY if bytes_whole > bytes_gathered else ()),
    )
    together = max(whole.longest, whole.layer, _FEWEST_BYTES)
    if whole.longest > 0 and together < min(bytes_whole, _MOST_BYTES):
        why = "the first gradients, and those of rows, cross while products make the last: a message is as one weight"
        options = (*options, CompilerOption("xla_gpu_all_reduce_combine_threshold_bytes", together, why))
    sizes = gathered if bytes_gathered >= bytes_whole else whole
    if any(layout.rotated is not None for layout, _ in variables):
        options = (*options, _BOTH_AROUND)
    elif sizes.longest > sizes.layer > 0:
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
