"""Steps of one GPT by two processes with a core each: ours by its schedules, by data parallelism, and the peers'."""

from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.harness import Report, say, take_turns
from benchmarks.harness.gpt2 import Shape
from benchmarks.pipedream import peers
from benchmarks.pipedream.group import Group, Taken
from benchmarks.pipedream.peers import DIVIDED, ONE
from benchmarks.pipedream.running import running, warmed

_OTHERS = ("Eager1F1B",)
"""Schedules of ours that are claimed against peers alone."""
STEP, TOKENS = "step", "tokens"
_CLAIMS = {"1F1B": ("two_processes_1f1b", 1.75), "ZB-H1": ("two_processes_zb_h1", 1.82)}


def steps(
    report: Report, shape: Shape, *, microbatches: int, rounds: int, warmup: int, spectrax: Path, few: bool
) -> None:
    """Lets all systems take steps in turns; claims ours against one process, and against the best peer.

    **Arguments:** `warmup`: steps that do not count. `spectrax`: Python of the peer's environment. `few`: schedules.
    """
    case = f"GPT, {shape.layers} layers of width {shape.width}, {microbatches} microbatches"
    own = peers.our_systems(shape, [*_CLAIMS][:1] if few else [*_CLAIMS, *_OTHERS], microbatches)
    if few:
        del own[DIVIDED]
    others = peers.peers(shape, microbatches, spectrax, few=few)
    with running(report, case, {**own, **others}) as found:
        warmed(found, warmup)
        figures = take_turns({name: _step(one) for name, one in found.items()}, rounds=rounds)
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


def _step(running: Group) -> Callable[[], float]:
    def step() -> float:
        taken: list[Taken] = running.ask("step")
        return max(one.seconds for one in taken)

    return step
