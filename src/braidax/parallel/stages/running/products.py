"""Options of the compiler for the products of a stage."""

from collections.abc import Mapping

AS_IS: Mapping[str, str] = {}
"""What the compiler does by itself."""

PACKED: Mapping[str, str] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}
"""XLA for CPUs gives products to Eigen, which copies a block of weights in the order of the memory before it multiplies.

YNNPACK, its default, multiplies by rows of weights where they lie. Those of a stage are not in a core's cache when its
next microbatch comes: products with 128 rows took 15 % longer. Eigen takes half as long again where it has to turn the
weights.
"""

LEAST_TURNED = 4
"""From how many microbatches on turning weights once is worth its time."""
