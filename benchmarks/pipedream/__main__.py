"""Pipelines that cut themselves: cuts, schedules, and steps of two processes, beside what users have today.

GPT-2's shape, ResNet-50 and BERT are cut, and their cuts timed beside all others; schedules are searched for, beside
the shortest there are; what the executor holds, and takes for each operation, is counted. Two processes with a core
each take steps of one GPT: by ours, by torch.distributed.pipelining, and by SpectraX.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from benchmarks.harness import Report, arguments, run, say
from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream import bubble, cuts, dispatch, memory, peers, planning, searches, steps
from benchmarks.pipedream.programs import bert_program, gpt_program, resnet_program
from braidax.program import Program
from braidax.tasks.bert_model import Sizes

NUM_DEVICES = 8


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`.

    **Fields:** `programs`: that are cut, by name, with the margin that `cuts.balanced` takes and into how many stages;
    timed `looks` times, then in `rounds`. `instances` of searches with `draws` each, and a heavy head on `devices`.
    `leaves`: of a dispatched stage, in `updates`. `held`: devices and microbatches of what is held by
    `schedules`. `planned`: BERT,
    into `planned_stages`. `trained`: with all samples, in `microbatches`, or `few_microbatches`, which are
    `longer` where each operation is timed; in `turns`, behind `warmup` steps.
    """

    programs: dict[str, tuple[Callable[[], Program], float, Sequence[int]]]
    looks: int
    rounds: int
    instances: Sequence[searches.Instance]
    draws: int
    devices: Sequence[int]
    leaves: int
    updates: int
    held: tuple[int, int]
    schedules: Sequence[str]
    planned: Sizes
    planned_stages: int
    trained: Shape
    microbatches: int
    few_microbatches: int
    longer: int
    turns: int
    warmup: int


def _kept(vocabulary: int, width: int, layers: int, length: int, batch: int) -> Shape:
    return Shape(vocabulary, width, layers, length, batch, backward="kept", output="apart")


FULL = Scale(
    programs={
        "GPT": (lambda: gpt_program(_kept(8192, 256, 12, 64, 4)), 1.15, (2, 4, 8)),
        "ResNet-50": (lambda: resnet_program((3, 4, 6, 3), 64, 4), 1.05, (2, 4)),
        "BERT": (lambda: bert_program(Sizes(8192, 64, width=256, num_layers=12, num_heads=4), 4), 1.15, (2, 4, 8)),
    },
    looks=5,
    rounds=9,
    instances=searches.INSTANCES,
    draws=8,
    devices=(2, 4),
    leaves=100,
    updates=100,
    held=(4, 8),
    schedules=tuple(searches.NAMED),
    planned=Sizes(positions=128),
    planned_stages=4,
    trained=_kept(256, 256, 8, 64, 2 * 16),  # bytes: so light a head that who cuts by hand is balanced
    microbatches=16,
    few_microbatches=4,
    longer=4,  # operations of 40 to 100 ms: on a busy core the end of one is seen a tick late, which is 4 ms
    turns=7,
    warmup=3,
)
QUICK = Scale(
    programs={"GPT": (lambda: gpt_program(_kept(64, 64, 2, 8, 2)), 1.0, (2,))},
    looks=1,
    rounds=1,
    instances=searches.INSTANCES[-2:],
    draws=1,
    devices=(2,),
    leaves=4,
    updates=2,
    held=(2, 2),
    schedules=("1F1B",),
    planned=Sizes(64, 8, width=64, num_layers=2, num_heads=1),
    planned_stages=2,
    trained=_kept(64, 64, 2, 8, 4),
    microbatches=4,
    few_microbatches=2,
    longer=1,
    turns=1,
    warmup=2,
)


def main() -> int:
    parser = arguments("pipedream", __doc__ or "", tuple(_CASES))
    parser.add_argument(
        "--spectrax", metavar="PYTHON", type=Path, default=peers.SPECTRAX, help="of an environment with spectrax-lib"
    )
    options = parser.parse_args()
    scale, report = QUICK if options.quick else FULL, Report(options, "jaxlib", "optax", "flax", "torch")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    for name in options.only or (_FEWER if options.quick else tuple(_CASES)):
        start = time.perf_counter()
        _CASES[name](report, scale, options.spectrax)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
    return report.finish()


def _cut(report: Report, scale: Scale, _: Path) -> None:
    ratios: list[float] = []
    for name, (make, margin, stages) in scale.programs.items():
        looks, rounds = scale.looks, scale.rounds
        ratios += cuts.balanced(report, name, make(), stages, margin=margin, looks=looks, rounds=rounds)
    report.at_most("cut", max(ratios), 1.02)


def _search(report: Report, scale: Scale, _: Path) -> None:
    searches.beside_the_shortest(report, scale.instances, scale.draws)
    searches.with_a_heavy_head(report, scale.devices, 8)


def _dispatch(report: Report, scale: Scale, _: Path) -> None:
    rounds, count = scale.updates, scale.microbatches
    dispatch.dispatch(report, ("1F1B", "ZB-H1"), leaves=scale.leaves, microbatches=count, rounds=rounds)


def _memory(report: Report, scale: Scale, _: Path) -> None:
    devices, count = scale.held
    memory.memory(report, scale.schedules, width=32, samples=8, num_devices=devices, microbatches=count)


def _plan(report: Report, scale: Scale, _: Path) -> None:
    planning.plan(report, scale.planned, samples=2, microbatches=4, num_stages=scale.planned_stages)


def _steps(report: Report, scale: Scale, spectrax: Path) -> None:
    steps.steps(
        report,
        scale.trained,
        microbatches=scale.microbatches,
        rounds=scale.turns,
        warmup=scale.warmup,
        spectrax=spectrax,
        few=scale is QUICK,
    )


def _bubble(report: Report, scale: Scale, _: Path) -> None:
    count = scale.few_microbatches
    samples = scale.longer * scale.trained.batch // scale.microbatches
    shape = _kept(*_sizes(scale.trained), samples * count)
    bubble.bubbles(report, shape, microbatches=count, rounds=scale.turns, warmup=scale.warmup)


def _sizes(shape: Shape) -> tuple[int, int, int, int]:
    return shape.vocabulary, shape.width, shape.layers, shape.length


_CASES: dict[str, Callable[[Report, Scale, Path], object]] = {
    "cuts": _cut,
    "search": _search,
    "dispatch": _dispatch,
    "memory": _memory,
    "plan": _plan,
    "steps": _steps,
    "bubble": _bubble,
}
_FEWER = ("cuts", "search", "dispatch", "memory", "steps")  # with --quick

if __name__ == "__main__":
    run(main)
