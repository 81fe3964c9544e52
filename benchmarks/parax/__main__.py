"""One batch on 4 processes x 2 devices: ours, one process that loads for all, and the rules of Alpa, Grain, MaxText.

Photographs and token sequences from files, each with data parallelism, a model axis over processes, sequences cut over
processes, two stages. Counted: records decoded, bytes read, bytes sent. Timed: until a batch is ready on all devices,
and a training loop. What each system delivers is compared with the files, number by number, before it is timed.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, absent, arguments, run, say, take_turns
from benchmarks.harness.gangs import processes
from benchmarks.parax import rank
from benchmarks.parax.broadcast import Cluster, ray_actor
from benchmarks.parax.cases import DEVICES_EACH, NUM_PROCESSES, Case, write
from benchmarks.parax.planning import plan_seconds
from benchmarks.parax.rank import JAX, JAX_THREADS, MAXTEXT, OURS, RAY, RAY_THREADS, Counts
from braidax.gang import LocalGang

_LIMIT_SECONDS = 120.0  # of one call of the processes
_CASES = {
    "photos": ("data", "data_model", "stages"),
    "small photos": ("data_model",),
    "tokens": ("data", "data_model", "sequence", "stages"),
}
CASES = {f"{data}, {strategy}": (data, strategy) for data, strategies in _CASES.items() for strategy in strategies}
_PLAN = "plan_4096"
_CLAIMED = ("photos, data", "photos, data_model")
_BROADCASTS = (RAY, RAY_THREADS, JAX, JAX_THREADS)
_PEERS = tuple(system for system in rank.SYSTEMS if system != OURS)
READY, LOOP = "until arrays are ready", "in a training loop"
COUNTED, ALONE = "read and sent", "a step and an exchange alone"
_SAMPLES = "samples"


@dataclass(frozen=True)
class Scale:
    """How much is measured: full, or `--quick`.

    **Fields:** `cases`; `in_loop`: those that are also timed in a training loop; by data `batch_sizes`, and
    `num_epochs` and `loop_epochs` of one figure; `rounds`, `loop_rounds`: figures of a system.
    """

    cases: Sequence[str]
    in_loop: Sequence[str]
    num_photos: int
    num_sequences: int
    batch_sizes: Mapping[str, int]
    num_epochs: Mapping[str, int]
    loop_epochs: Mapping[str, int]
    rounds: int
    loop_rounds: int


FULL = Scale(
    cases=list(CASES),
    in_loop=("photos, data_model", "tokens, sequence"),
    num_photos=128,
    num_sequences=4096,
    batch_sizes={"photos": 64, "small photos": 64, "tokens": 256},
    num_epochs={"photos": 10, "small photos": 15, "tokens": 3},
    loop_epochs={"photos": 5, "tokens": 2},
    rounds=3,
    loop_rounds=2,
)
QUICK = Scale(
    cases=("photos, data", "photos, data_model", "photos, stages", "tokens, sequence"),
    in_loop=("photos, data_model",),
    num_photos=32,
    num_sequences=512,
    batch_sizes={"photos": 16, "small photos": 16, "tokens": 256},
    num_epochs={"photos": 1, "small photos": 1, "tokens": 2},
    loop_epochs={"photos": 1},
    rounds=1,
    loop_rounds=1,
)


def main() -> int:
    parser = arguments("parax", __doc__ or "", [*CASES, _PLAN])
    parser.add_argument("--inputs", metavar="FOLDER", help="keep the generated inputs here and use them again")
    parser.add_argument("--threads", type=int, default=1, help="that read and decode, per process (%(default)s)")
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    report = Report(options, "ray", "grain", "pillow", "simplejpeg")
    chosen = options.only or [*scale.cases, _PLAN]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.inputs or scratch) / f"{scale.num_photos}_{scale.num_sequences}"
        write(folder, num_photos=scale.num_photos, num_sequences=scale.num_sequences)
        cases = [
            Case(data, strategy, str(folder), scale.batch_sizes[data], options.threads)
            for data, strategy in (CASES[name] for name in chosen if name in CASES)
        ]
        if cases:
            _measure(report, scale, cases)
    if _PLAN in chosen:
        _plan(report, scale)
    return report.finish()


@dataclass(frozen=True)
class Found:
    """Of one case.

    **Fields:** `needed_bytes`: what has to come to ours from other processes in an epoch. `counts`: by system, of all
    processes. `loops`: by system, seconds a batch. `exchange_seconds`: of ours.
    """

    case: Case
    needed_bytes: int
    counts: Mapping[str, Counts]
    loops: Mapping[str, Sequence[float]]
    exchange_seconds: Sequence[float]


def _measure(report: Report, scale: Scale, cases: Sequence[Case]) -> None:
    systems = _installed(report, scale, cases)
    with contextlib.ExitStack() as stack:
        ray = stack.enter_context(ray_actor()) if RAY in systems else None
        gang, port = stack.enter_context(processes(NUM_PROCESSES))
        ask = _Asking(gang, port, ray)
        ask(rank.join, DEVICES_EACH, ask.port, ray.address if ray else "")
        found = {case.name: _case(report, scale, case, systems, ask) for case in cases}
    _claim(report, found)


def _installed(report: Report, scale: Scale, cases: Sequence[Case]) -> list[str]:
    """Returns the systems that are there; of the others the report says why they are not."""
    systems: list[str] = []
    for system in rank.SYSTEMS:
        why = next((why for module in rank.NEEDS.get(system, ()) if (why := absent(module))), "")
        if why:
            report.missing(READY, system, why)
            if any(case.name in scale.in_loop for case in cases):
                report.missing(LOOP, system, why)
        else:
            systems.append(system)
    return systems


def _claim(report: Report, found: Mapping[str, Found]) -> None:
    photos, tokens = ([name for name in found if CASES[name][0].endswith(data)] for data in ("photos", "tokens"))
    large = [name for name in photos if CASES[name][0] == "photos"]
    looped = [name for name in found if found[name].loops]
    for claim, case, lines, peers in (
        ("broadcast", READY, large, _BROADCASTS),
        ("photos", READY, photos, _PEERS),
        ("tokens", READY, tokens, _PEERS),
        ("loop", LOOP, looped, _PEERS),
    ):
        if lines:
            report.against(claim, case, _SAMPLES, ours=OURS, peers=peers, at=lines)
    decoded = [one for one in found.values() if one.case.data != "tokens"]  # which are read again where that is quicker
    if decoded:
        report.at_most("redundancy", max(map(_redundancy, decoded)), 1)
    replicated = found.get("photos, data_model")
    if replicated is not None and replicated.loops:
        interval = statistics.median(replicated.loops[OURS])
        report.at_most("reshard", [100 * seconds / interval for seconds in replicated.exchange_seconds], 5)
    claimed = [found[name] for name in _CLAIMED if name in found]
    if claimed:
        report.at_most("broadcast_bytes", max(_sent_share(one) for one in claimed), 1 / NUM_PROCESSES)
    needed = [one for one in found.values() if one.needed_bytes]
    if needed:
        report.at_most("sent_over_needed", max(one.counts[OURS].sent_bytes / one.needed_bytes for one in needed), 1.02)


def _case(report: Report, scale: Scale, case: Case, systems: Sequence[str], ask: "_Asking") -> Found:
    """Checks, counts and times all systems."""
    say(f"{case.name} …")
    counts: dict[str, Counts] = {}
    for system in systems:
        _check(case, system, ask)
        counts[system] = _count(report, case, system, ask)
    seconds = _turns(case, systems, ask, scale.num_epochs[case.data], None, scale.rounds)
    _rates(report, case, READY, seconds)
    loops: Mapping[str, Sequence[float]] = {}
    exchange: Sequence[float] = []
    if case.name in scale.in_loop:
        baseline = min(statistics.median(seconds[system]) for system in _BROADCASTS if system in systems)
        iterations = _iterations(case, ask, baseline)
        loops = _turns(case, systems, ask, scale.loop_epochs[case.data], iterations, scale.loop_rounds)
        _rates(report, case, LOOP, loops)
        exchange = [max(one) for one in zip(*ask(rank.exchange_seconds, case, 2 * scale.rounds), strict=True)]
        report.add(ALONE, OURS, "exchange", "ms", [1e3 * value for value in exchange], at=case.name)
        report.add(ALONE, OURS, "step", "ms", [1e3 * max(ask(rank.step_seconds, case, iterations, 4))], at=case.name)
    needed = case.num_batches * sum(ask(rank.needed_bytes, case, OURS))
    ask(rank.forget)
    return Found(case, needed, counts, loops, exchange)


def _check(case: Case, system: str, ask: "_Asking") -> None:
    """Raises unless one batch holds what the files do: one record in each row, the same on all devices, none twice."""
    rows: dict[int, set[int]] = {}
    for found in ask(rank.found_records, case, system):
        for row, records in found.items():
            rows.setdefault(row, set()).update(records)
    held = [records for _, records in sorted(rows.items())]
    distinct = set[int]().union(*held)
    if sorted(rows) != list(range(case.batch_size)) or any(len(records) != 1 for records in held) or -1 in distinct:
        raise RuntimeError(f"{case.name}, {system}: rows are {rows}, expected one record of the files for each")
    if len(distinct) != case.batch_size:
        raise RuntimeError(f"{case.name}, {system}: {case.batch_size} rows hold {len(distinct)} different records")
    records = [one for (one,) in held]
    if system == OURS and any(records != drawn for drawn in ask(rank.drawn_records, case)):
        raise RuntimeError(f"{case.name}, {system}: rows hold {records}, not what the loader says that it draws")
    if wrong := [found for found in ask(rank.num_wrong, case, system, records) if found]:
        raise RuntimeError(f"{case.name}, {system}: numbers that differ from the files, by process: {wrong}")


def _count(report: Report, case: Case, system: str, ask: "_Asking") -> Counts:
    total = Counts(*(sum(values) for values in zip(*ask(rank.counted, case, system, ask.port), strict=True)))
    num_batches = case.num_batches
    for metric, unit, value in (
        ("records read, a batch", "", total.records),
        ("bytes read, a batch", "MB", total.read_bytes / 1e6),
        ("sent between processes, a batch", "MB", _sent(total) / 1e6),
        ("said by JAX's coordination service, a batch", "KB", total.told_bytes / 1e3),
    ):
        report.add(COUNTED, system, metric, unit, [value / num_batches], at=case.name)
    if system in (OURS, MAXTEXT):
        needed = sum(ask(rank.needed_bytes, case, system))
        report.add(COUNTED, system, "needed from other processes, a batch", "MB", [needed / 1e6], at=case.name)
    return total


def _turns(
    case: Case, systems: Sequence[str], ask: "_Asking", num_epochs: int, iterations: int | None, rounds: int
) -> dict[str, list[float]]:
    """Returns the seconds that a batch takes, by system."""

    def turn(system: str) -> Callable[[], float]:
        return lambda: max(ask.alone(system, rank.timed, case, system, num_epochs, iterations))

    figures = take_turns({system: turn(system) for system in systems}, rounds=rounds)
    medians = ", ".join(f"{system} {1e3 * statistics.median(values):.1f}" for system, values in figures.items())
    say(f"  {'ready' if iterations is None else 'loop'}: {medians} ms")
    return figures


def _iterations(case: Case, ask: "_Asking", target_seconds: float) -> int:
    """Returns how many products of matrices make a step of about that long."""
    few, many = (max(ask(rank.step_seconds, case, iterations, 2)) for iterations in (1, 17))
    return max(1, round((target_seconds - few) / max((many - few) / 16, 1e-6)))


def _rates(report: Report, case: Case, table: str, seconds: Mapping[str, Sequence[float]]) -> None:
    for system, values in seconds.items():
        rates = [case.batch_size / value for value in values]
        report.add(table, system, _SAMPLES, "samples/s", rates, at=case.name)


def _redundancy(found: Found) -> float:
    """Returns bytes that ours has read in an epoch, over those of all records."""
    return found.counts[OURS].read_bytes / found.case.source().num_bytes


def _sent(counts: Counts) -> float:
    return counts.sent_bytes + counts.received_bytes


def _sent_share(found: Found) -> float:
    """Returns the bytes of samples that ours has to send, over those that the baseline sends that sends fewer.

    Both without what the protocols add; `sent_over_needed` says that ours sends no more than it has to.
    """
    return found.needed_bytes / min(_sent(found.counts[system]) for system in _BROADCASTS if system in found.counts)


def _plan(report: Report, scale: Scale) -> None:
    seconds = [plan_seconds(number) for number in range(2 * scale.rounds + 1)]
    report.add("plan, 4096 devices", OURS, "time", "s", seconds)
    report.at_most("plan_4096", seconds, 1)


class _Asking:
    """Lets all processes do something.

    **Arguments:** `gang`: has them. `port`: for JAX's coordination service. `ray`: rests while others are
    measured; None where there is none.
    """

    def __init__(self, gang: LocalGang, port: int, ray: Cluster | None) -> None:
        self._gang = gang
        self.port = port
        self._ray = ray

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns what each process returned."""
        return self._gang.run(fn, *args, timeout_seconds=_LIMIT_SECONDS)

    def alone(self, system: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """As a call, while nothing runs that the system does not use."""
        used = system in (RAY, RAY_THREADS)
        with contextlib.nullcontext() if self._ray is None or used else self._ray.resting():
            return self(fn, *args)


if __name__ == "__main__":
    run(main)
