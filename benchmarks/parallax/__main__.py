"""Tables by rows: ours, all-reducing everything, XLA's own way with tables split, Horovod's gathering, TorchRec.

LM1B with its whole vocabulary, DLRM with 26 tables, BERT and ResNet-50, cut so that all systems fit into memory; the
sizes are part of each case's name. Devices are virtual and share the cores: compared are work, and the bytes that the
compiled programs exchange. Then processes that exchange by gloo, their bytes counted at the sockets. Further: how the
step grows with the vocabulary, whether losses go the same way, and how long BERT-base and Flax' lm1b take to plan.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from benchmarks.harness import Report, arguments, models, run, say
from benchmarks.harness.models import VOCABULARY
from benchmarks.parallax import cases
from benchmarks.parallax.absent import first_read_late
from benchmarks.parallax.beside import undisturbed
from benchmarks.parallax.processes import against_torchrec, processes
from benchmarks.parallax.systems import DENSE, GATHER, MEASURED, OURS, PLAIN, XLA, make_mesh, systems_of
from braidax.tasks.bert_model import Sizes

NUM_DEVICES = 4


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`.

    **Fields:** `cases`: their names. `rounds`: turns of a system, two timed steps each. `num_sampled`: shared
    candidates of the case of that name. `vocabulary`, `width`: of LM1B's tables.
    `systems`: those of the models, or fewer. `dlrm_rows`: of a table at most. `bert`: with a vocabulary that
    `NUM_DEVICES` divides, since Flax takes no other table than it has made. `stages`: of ResNet.
    `equal_rounds`: of ours and plain data parallelism in turns. `num_processes`, `process_width`, `num_steps`: of the
    job of processes. `curve_steps`, `curves`: which tasks.
    """

    cases: Sequence[str]
    rounds: int
    num_sampled: int
    vocabulary: int
    width: int
    systems: Sequence[str] | None
    dlrm_rows: int
    bert: Sizes
    stages: tuple[int, ...]
    equal_rounds: int
    num_processes: Sequence[int]
    process_width: int
    num_steps: int
    curves: Sequence[str]
    curve_steps: int


FULL = Scale(
    cases=(
        "lm1b",
        "candidates",
        "growth",
        "dlrm",
        "bert",
        "resnet50",
        "processes",
        "torchrec",
        "curves",
        "trace",
        "absent",
    ),
    rounds=4,
    num_sampled=8192,
    vocabulary=VOCABULARY,
    width=128,
    systems=None,
    dlrm_rows=2_000_000,
    bert=Sizes(30_524, positions=128, num_layers=2),
    stages=(3, 4, 6, 3),
    equal_rounds=30,
    num_processes=(2, 4),
    process_width=64,
    num_steps=5,
    curves=("lm1b", "dlrm"),  # BERT of that size is chaotic: one device and four part by 3 %, too
    curve_steps=200,
)
QUICK = Scale(
    cases=("lm1b", "candidates", "processes", "trace", "absent"),
    rounds=2,
    num_sampled=1024,
    vocabulary=100_000,
    width=64,
    systems=(OURS, PLAIN, GATHER),
    dlrm_rows=20_000,
    bert=Sizes(4000, 32, width=64, num_layers=2, num_heads=2),
    stages=(1, 1, 1, 1),
    equal_rounds=6,
    num_processes=(2,),
    process_width=16,
    num_steps=3,
    curves=("lm1b",),
    curve_steps=20,
)


def main() -> int:
    parser = arguments("parallax", __doc__ or "", tuple(_CASES))
    parser.add_argument("--torchrec", metavar="PYTHON", help="of an environment with TorchRec, as a peer")
    options = parser.parse_args()
    scale, report = QUICK if options.quick else FULL, Report(options, "jaxlib", "optax", "flax")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    mesh = make_mesh()
    for name in options.only or scale.cases:
        start = time.perf_counter()
        with undisturbed(report, name) if name in _WITHIN else contextlib.nullcontext():
            _CASES[name](report, scale, mesh, options.torchrec)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
        jax.clear_caches()
    return report.finish()


def _lm1b(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    model = models.lm1b(scale.vocabulary, scale.width, 128 * NUM_DEVICES)
    systems = systems_of(model, mesh)
    if scale is QUICK:
        del systems[DENSE], systems[MEASURED]
    found = cases.measure(report, model, mesh, systems, rounds=scale.rounds)
    cases.claim(report, "lm1b", model, found, steps=1.5)


def _candidates(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    """As many candidates as published, which all devices share; for the bytes."""
    model = models.lm1b(scale.vocabulary, scale.width, 128 * NUM_DEVICES, num_sampled=scale.num_sampled)
    systems = {name: system for name, system in systems_of(model, mesh).items() if name in (OURS, XLA, GATHER)}
    found = cases.measure(report, model, mesh, systems, rounds=1)
    cases.claim(report, "candidates", model, found, steps=None)


def _wide(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    """As wide as published, with the systems of which four devices fit; only when asked for: init takes 40 GB yet."""
    model = models.lm1b(scale.vocabulary, 512 if scale is FULL else scale.width, 128 * NUM_DEVICES)
    fit = {name: system for name, system in systems_of(model, mesh).items() if name in (OURS, MEASURED, XLA)}
    cases.claim(report, "wide", model, cases.measure(report, model, mesh, fit, rounds=scale.rounds), steps=3)


def _growth(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    def model(vocabulary: int) -> models.Model:
        return models.lm1b(vocabulary, scale.width, 128 * NUM_DEVICES, most=scale.vocabulary // 4 - 1)

    cases.growth(report, model, scale.vocabulary, mesh, rounds=scale.rounds)


def _dlrm(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    model = models.dlrm(scale.dlrm_rows, 512 * NUM_DEVICES)
    found = cases.measure(report, model, mesh, _chosen(model, mesh, scale), rounds=scale.rounds)
    cases.claim(report, "dlrm", model, found, steps=1)


def _bert(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    model = models.bert(2 * NUM_DEVICES, scale.bert)
    found = cases.measure(report, model, mesh, _chosen(model, mesh, scale), rounds=scale.rounds)
    cases.claim(report, "bert", model, found, steps=1)


def _resnet50(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    cases.equal(report, models.resnet(scale.stages, 64, 2 * NUM_DEVICES), mesh, rounds=scale.equal_rounds)


def _processes(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    for number in scale.num_processes:
        make = functools.partial(models.lm1b, scale.vocabulary, scale.process_width, 128 * number)
        processes(report, number, make, count=scale.num_steps, rounds=scale.rounds // 2)


def _torchrec(report: Report, scale: Scale, mesh: Mesh, python: str | None) -> None:
    if python is None:
        report.note("TorchRec is missing: not installed (see --torchrec)")
        report.not_measured("torchrec", ">= 1", "TorchRec is not installed (see --torchrec)")
        return
    make = functools.partial(models.lookup, scale.vocabulary, scale.width, 128 * NUM_DEVICES, NUM_DEVICES)
    against_torchrec(report, python, NUM_DEVICES, make, count=4 * scale.num_steps, rounds=scale.rounds // 2)


def _curves(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    cases.curves(report, mesh, scale.curves, steps=scale.curve_steps)


def _trace(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    cases.planning(report, mesh, rounds=scale.rounds // 2)


def _absent(report: Report, scale: Scale, mesh: Mesh, _: str | None) -> None:
    first_read_late(report, mesh, num_steps=10 * scale.curve_steps, rounds=5 * scale.rounds)


def _chosen(model: models.Model, mesh: Mesh, scale: Scale) -> dict[str, cases.System]:
    found = systems_of(model, mesh)
    return {name: system for name, system in found.items() if scale.systems is None or name in scale.systems}


_CASES: dict[str, Callable[[Report, Scale, Mesh, str | None], None]] = {
    "lm1b": _lm1b,
    "candidates": _candidates,
    "wide": _wide,
    "growth": _growth,
    "dlrm": _dlrm,
    "bert": _bert,
    "resnet50": _resnet50,
    "processes": _processes,
    "torchrec": _torchrec,
    "curves": _curves,
    "trace": _trace,
    "absent": _absent,
}

_WITHIN = (
    "lm1b",
    "candidates",
    "wide",
    "growth",
    "dlrm",
    "bert",
    "resnet50",
    "curves",
    "trace",
    "absent",
)  # this process

if __name__ == "__main__":
    run(main)
