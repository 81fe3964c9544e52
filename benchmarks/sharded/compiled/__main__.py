"""Programs that are compiled, not run: what waits on H100s and TPUs, what an earlier version compiled; and plans.

The compilers of GPUs and TPUs need no such devices. What they are given is GPT-2's shape, scanned and rematerialised,
for 8 devices.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import AxisType, Mesh

from benchmarks.harness import Report, arguments, models, run, say
from benchmarks.harness.compilers import H100, V5E, why_absent
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.systems import BY_HAND, HELD, OURS, XLA
from benchmarks.sharded.compiled import ahead, planning, same
from braidax.tasks.bert_model import Sizes

NUM_DEVICES = 8


@dataclass(frozen=True)
class Scale:
    """How much is compiled: full, or `--quick`.

    **Fields:** `shapes`: of GPT-2's form. `peers`: that are compiled for the first of them. `bert`: what is planned,
    `rounds` times. `same`: how many cases, all if None. `clicks`: rows of a table of DLRM, at most,
    and samples.
    """

    shapes: Sequence[Shape]
    peers: Sequence[str]
    bert: Sizes
    rounds: int
    same: int | None
    clicks: tuple[int, int]


_WIDE, _WORDS = Shape(8192, 1024, 24, 1024, 32), Shape(50_257, 768, 24, 1024, 32)
FULL = Scale((_WORDS, _WIDE), (XLA, HELD, BY_HAND), Sizes(), 3, None, (100_000, 2048))
QUICK = Scale(
    (Shape(4096, 128, 2, 32, 8),), (), Sizes(1000, 32, width=64, num_layers=2, num_heads=2), 1, 2, (1000, 256)
)


def main() -> int:
    parser = arguments("sharded.compiled", __doc__ or "", tuple(_CASES))
    parser.add_argument("--before", metavar="PATH", type=Path, help="a checkout to compare with; by default git's")
    options = parser.parse_args()
    scale, report = QUICK if options.quick else FULL, Report(options, "jaxlib", "optax", "flax")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    for name in options.only or _CASES:
        start = time.perf_counter()
        _CASES[name](report, scale, options.before)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
        jax.clear_caches()
    return report.finish()


def _h100(report: Report, scale: Scale, _: Path | None) -> None:
    claims = {
        "overlap_h100": 0.03, "overlap_h100_all_reduces": 0.1, "overlap_h100_words": 0.1, "overlap_h100_rows": 0.1,
    }  # fmt: skip
    if why := why_absent(H100):
        for claim, target in claims.items():
            report.not_measured(claim, f"<= {target:g}", why)
        return
    sharded, summed, rows = list[float](), list[float](), list[float]()
    for shape in scale.shapes:
        peers = scale.peers if shape == scale.shapes[0] else ()
        sharded.append(ahead.waited(ahead.fully_sharded(report, H100, shape, peers=peers)))
        summed.append(ahead.waited(ahead.data_parallel(report, H100, shape), ahead.SUMS))
        rows.append(ahead.waited(ahead.rows(report, H100, shape), ahead.EXCHANGES))
    if scale.peers:
        case = ahead.case_of(scale.shapes[0], H100)
        report.against("overlap_h100_peers", case, ahead.WAITED, ours=OURS, peers=scale.peers)
    clicks = [ahead.waited(ahead.clicks(report, H100, models.dlrm(*scale.clicks)), ahead.EXCHANGES)]
    for (claim, target), parts in zip(claims.items(), (sharded, summed, rows, clicks), strict=True):
        report.at_most(claim, max(parts), target)


def _v5e(report: Report, scale: Scale, _: Path | None) -> None:
    if why := why_absent(V5E):
        report.not_measured("overlap_v5e", "<= 0.1", why)
        return
    found = [ahead.fully_sharded(report, V5E, shape, peers=()) for shape in scale.shapes]
    report.at_most("overlap_v5e", max(ahead.waited(one, ahead.GATHERS) for one in found), 0.1)


def _same(report: Report, scale: Scale, before: Path | None) -> None:
    same.compare(report, before, first=scale.same)


def _plan(report: Report, scale: Scale, _: Path | None) -> None:
    data, both = _mesh((NUM_DEVICES,), ("data",)), _mesh((NUM_DEVICES // 2, 2), ("data", "model"))
    planning.plan_bert(report, data, both, scale.bert, rounds=scale.rounds)


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


_CASES: dict[str, Callable[[Report, Scale, Path | None], None]] = {
    "plan": _plan,
    "h100": _h100,
    "v5e": _v5e,
    "same": _same,
}

if __name__ == "__main__":
    run(main)
