"""Steps of one GPT by two processes with a core each: ours by its schedules, by data parallelism, and the peers'."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from benchmarks.harness import Report, say, take_turns
from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream import peers
from benchmarks.pipedream.group import Failed, Group, Taken, group
from benchmarks.pipedream.peers import DIVIDED, ONE, System
from benchmarks.pipedream.searches import NAMED
from braidax.parallel.stages.schedules import Costs, simulate

STEP, TOKENS = "step", "tokens"
SCHEDULES = ("GPipe", "1F1B", "ZB-H1")
_CLAIMS = {"1F1B": ("two_processes_1f1b", 1.75), "ZB-H1": ("two_processes_zb_h1", 1.82)}
_SAME = 1e-3  # of losses: what rounding and other orders of sums leave
BUBBLE = "devices that wait"
FORMULA, SIMULATED, MEASURED = "all stages alike", "simulated", "measured"


def steps(
    report: Report, shape: Shape, *, microbatches: int, rounds: int, warmup: int, spectrax: Path, few: bool
) -> None:
    """Lets all systems take steps in turns; claims ours against one process, and against the best peer.

    **Arguments:** `warmup`: steps that do not count. `spectrax`: Python of the peer's environment. `few`: schedules.
    """
    case = f"GPT, {shape.layers} layers of width {shape.width}, {microbatches} microbatches"
    own = peers.our_systems(shape, SCHEDULES[1:2] if few else SCHEDULES[1:], microbatches)
    if few:
        del own[DIVIDED]
    others = peers.peers(shape, microbatches, spectrax, few=few)
    with _running(report, case, {**own, **others}) as running:
        _warmed(running, warmup)
        figures = take_turns({name: _step(one) for name, one in running.items()}, rounds=rounds)
    for name, seconds in figures.items():
        report.add(case, name, STEP, "s", seconds)
        report.add(case, name, TOKENS, "tokens/s", [shape.batch * shape.length / one for one in seconds])
    say(f"  { ({name: round(median(seconds), 3) for name, seconds in figures.items()}) }")
    for schedule, (claim, target) in _CLAIMS.items():
        name = peers.ours(schedule)
        if name in figures:
            pairs = zip(figures[ONE], figures[name], strict=True)
            report.at_least(claim, [alone / both for alone, both in pairs], target)
        else:
            report.not_measured(claim, f">= {target:g}", f"{name} did not run")
    ran = [name for name in own if name in figures and name not in (ONE, DIVIDED)]
    if ran:
        best = min(ran, key=lambda name: median(figures[name]))
        report.against("peer", case, STEP, ours=best, peers=list(others), at_least=1.2)
    else:
        report.not_measured("peer", ">= 1.2", "no pipeline of ours did run")


def bubbles(report: Report, shape: Shape, *, microbatches: int, rounds: int, warmup: int) -> None:
    """Claims that devices wait as long as a simulation says, of what each process measures of its stage."""
    case, apart = f"bubble, {microbatches} microbatches", list[float]()
    with _running(report, case, peers.pipelines(shape, SCHEDULES, microbatches)) as running:
        _warmed(running, warmup)
        for name, one in running.items():
            costs = _costs(one)
            schedule = NAMED[name.removeprefix("ours, ")](2, microbatches)
            simulated = simulate(schedule, costs)
            alike = simulate(schedule, Costs.even(2))
            measured = [_waited(one.ask("step")) for _ in range(rounds)]
            waits = sum(map(simulated.bubble, range(2))) / 2
            report.add(case, name, FORMULA, "%", [50 * sum(map(alike.bubble, range(2)))])
            report.add(case, name, SIMULATED, "%", [100 * waits])
            report.add(case, name, MEASURED, "%", [100 * each for each in measured])
            apart.append(abs(median(measured) - waits) / waits)
            say(f"  {name}: {100 * waits:.1f} % simulated, {100 * median(measured):.1f} % measured")
    if apart:
        report.at_most("bubble", max(apart), 0.1)
    else:
        report.not_measured("bubble", "<= 0.1", "no pipeline of ours did run")


@contextmanager
def _running(report: Report, case: str, systems: Mapping[str, System]) -> Generator[dict[str, Group]]:
    """Starts the systems that can be; of each other one the report says why not."""
    with ExitStack() as stack:
        found: dict[str, Group] = {}
        for name, system in systems.items():
            why = system.why
            if not why:
                try:
                    made = group(system.module, system.args, system.cores, python=system.python)
                    found[name] = stack.enter_context(made)
                except Failed as failed:
                    why = str(failed)
            if why:
                report.missing(case, name, why)
        yield found


def _warmed(running: Mapping[str, Group], warmup: int) -> None:
    """Lets each system take its first steps. **Raises:** `ValueError` for losses that are not those of the others."""
    losses: dict[str, list[float]] = {}
    for name, one in running.items():
        told = [one.ask("step") for _ in range(warmup)]
        losses[name] = [next(each.loss for each in all_of if each.loss is not None) for all_of in told]
        first = next(iter(losses.values()))
        if not all(math.isclose(mine, its, rel_tol=_SAME) for mine, its in zip(losses[name], first, strict=True)):
            raise ValueError(f"{name} has losses {losses[name]}, and {next(iter(losses))} has {first}: not equal work")


def _step(running: Group) -> Callable[[], float]:
    def step() -> float:
        taken: list[Taken] = running.ask("step")
        return max(one.seconds for one in taken)

    return step


def _waited(taken: Sequence[Taken]) -> float:
    """Returns which part of a step processes did not compute."""
    longest = max(one.seconds for one in taken)
    return 1 - sum(one.busy for one in taken) / (longest * len(taken))


def _costs(running: Group) -> Costs:
    found = running.ask("costs")
    forward, inputs, weight = (tuple(column) for column in zip(*(one.stage for one in found), strict=True))
    return Costs(forward, inputs, weight, (max(one.transfer for one in found),), (1, 1))
