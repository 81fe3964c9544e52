"""Products of a stage on a CPU: in which form they take weights, and by which library they are computed."""

import platform
from collections.abc import Mapping

AS_IS: Mapping[str, str] = {}
"""Options of the compiler: it chooses."""

PACKED: Mapping[str, str] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}
"""Options of the compiler: products are Eigen's, which copies a block of weights in the order of memory first.

YNNPACK, which XLA takes by itself, multiplies by weights where they lie. Those of a stage have left the core's cache
when its next microbatch comes: products of 128 rows with the weights of four layers took 15 % longer. Where Eigen has
to turn weights it takes half as long again; so this is for stages that are given them turned.
"""

LEAST_MICROBATCHES = 4
"""From how many on, of one update, weights are turned once for all of them."""


def packs(num_microbatches: int, *, is_flushed: bool) -> bool:
    """Returns whether a stage on this machine's CPU is given turned weights. **Arguments:** of the schedule."""
    return is_flushed and num_microbatches >= LEAST_MICROBATCHES and platform.machine() in ("x86_64", "AMD64")
