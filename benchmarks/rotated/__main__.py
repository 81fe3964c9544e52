"""Rotated tensor parallelism: memory, bytes and steps beside everything else that trains the same on 8 devices.

GPT-2's shape, scanned over layers and rematerialised, and BERT; by data parallelism, fully sharded by XLA and by ours,
with the work of layers split (Megatron's way), and rotated, with as many samples a device. What is large is compiled
and not run; steps of a small shape are timed in turns, on virtual devices that share the cores.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from benchmarks.harness import Report, arguments, run, say
from benchmarks.harness.compilers import H100, V5E
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.systems import OURS
from benchmarks.rotated import ahead, memory, mixture, sent, steps
from benchmarks.rotated.mixture import MIXTURES, Mixture
from benchmarks.rotated.plot import NAMES, draw
from benchmarks.rotated.ways import DDP, RTP, WAYS
from braidax.tasks.bert_model import Sizes

NUM_DEVICES = 8
MANY = ("h100:16", "v5e:4x4")


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`.

    **Fields:** `deep`: what is compiled only, at `depths`, of which `sent` also for bytes, and on `counts` devices.
    `sizes`: the paper's. `largest`: what layers are added to, under `limit_bytes`. `timed`: by `ways`, in `rounds`.
    `chips`: compiled ahead. `bert`, with `samples` a device. `moe`: with experts, by `mixtures`. Batches are those of a
    device.
    """

    deep: Shape
    depths: Sequence[int]
    sent: Sequence[int]
    counts: Sequence[int]
    sizes: Mapping[str, Shape]
    largest: Shape
    limit_bytes: int
    timed: Shape
    ways: Sequence[str]
    rounds: int
    chips: Shape
    bert: Sizes
    samples: int
    moe: Mixture
    mixtures: Sequence[str]


def _by_heads(vocabulary: int, width: int, layers: int, length: int, batch: int) -> Shape:
    return Shape(vocabulary, width, layers, length, batch, qkv="by heads")


_PAPER = ((1024, 24), (1280, 36), (1600, 48), (2560, 32))  # widths and layers
FULL = Scale(
    _by_heads(50_257, 1024, 24, 1024, 1),
    (4, 6, 12, 24),
    (4, 12, 24),
    (1, 2, 4, 8),
    {name: _by_heads(50_257, *size, 1024, 1) for name, size in zip(NAMES, _PAPER, strict=True)},
    _by_heads(8192, 512, 4, 128, 1),
    2**30,
    _by_heads(8192, 512, 4, 256, 1),
    WAYS,
    5,
    _by_heads(50_257, 2048, 24, 1024, 4),
    Sizes(30_528, num_layers=12),
    1,
    Mixture(50_257, 1024, 12, 1024, 1, qkv="by heads"),
    MIXTURES,
)
_SMALL = _by_heads(520, 512, 2, 64, 1)
QUICK = Scale(
    _SMALL,
    (2,),
    (2,),
    (2,),
    {"tiny": _SMALL},
    replace(_SMALL, layers=4),
    96 * 2**20,
    _SMALL,
    (DDP, OURS, RTP),
    2,
    replace(_SMALL, batch=4),
    Sizes(1024, 32, width=64, num_layers=2, num_heads=2),
    1,
    Mixture(520, 512, 2, 64, 1, qkv="by heads"),
    (RTP,),
)
_FEWER = ("bytes", "tokens", "moe", "steps")  # with --quick


def main() -> int:
    parser = arguments("rotated", __doc__ or "", tuple(_CASES))
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the paper's bars to FILE (.png or .svg)")
    options = parser.parse_args()
    scale, report = QUICK if options.quick else FULL, Report(options, "jaxlib", "optax", "flax")
    names = options.only or (_FEWER if options.quick else tuple(_CASES))
    if options.plot and "sizes" not in names:
        parser.error("--plot draws the case sizes, which is not among those that run")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    for name in names:
        start = time.perf_counter()
        _CASES[name](report, scale)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
    if options.plot:
        draw(report.rows, options.plot)
    return report.finish()


def _bytes(report: Report, scale: Scale) -> None:
    # As long as wide, positions would have the shape of a layer's weights.
    sent.weights(report, replace(scale.deep, length=scale.deep.length // 2), scale.sent, NUM_DEVICES)


_CASES: dict[str, Callable[[Report, Scale], object]] = {
    "bytes": _bytes,
    "tokens": lambda report, scale: sent.tokens(report, scale.timed, 16, NUM_DEVICES),
    "layers": lambda report, scale: memory.layers(report, scale.deep, scale.depths, NUM_DEVICES),
    "devices": lambda report, scale: memory.devices(report, scale.deep, scale.counts),
    "sizes": lambda report, scale: memory.sizes(report, scale.sizes, NUM_DEVICES),
    "largest": lambda report, scale: memory.largest(report, scale.largest, scale.limit_bytes, NUM_DEVICES),
    "bert": lambda report, scale: memory.bert(report, scale.bert, scale.samples, NUM_DEVICES),
    "moe": lambda report, scale: mixture.experts(report, scale.moe, scale.mixtures, NUM_DEVICES),
    "h100": lambda report, scale: ahead.chips(report, H100, scale.chips, 0.01),
    "v5e": lambda report, scale: ahead.chips(report, V5E, scale.chips, 0.05),
    "many": lambda report, scale: [ahead.many(report, target, scale.chips) for target in MANY],
    "steps": lambda report, scale: steps.steps(report, scale.timed, scale.ways, scale.rounds, NUM_DEVICES),
}

if __name__ == "__main__":
    run(main)
