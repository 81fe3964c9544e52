"""Fully sharded steps on processes of several devices each, which exchange by gloo over loopback."""

from collections.abc import Callable
from typing import Any

from benchmarks.harness import Report, gangs, say, take_turns
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.systems import BY_HAND, HELD, OURS, XLA
from benchmarks.sharded import rank

SYSTEMS = (OURS, XLA, HELD, BY_HAND)
STEP, SENT = "step", "sent by the busiest process, a step"
_LIMIT_SECONDS = 300.0  # of one call of the processes


def fully_sharded(report: Report, shape: Shape, *, num_processes: int, num_devices: int, rounds: int) -> None:
    """Lets ours and the peers take steps in turns, on the same processes.

    **Arguments:** `num_devices`: of all processes.
    """
    each = num_devices // num_processes
    case = f"GPT-2, width {shape.width}, {shape.layers} layers, {num_processes} processes × {each}"
    say(f"{case} …")
    sent: dict[str, float] = {}
    with gangs.processes(num_processes) as (gang, port):

        def ask(fn: Callable[..., Any], *args: Any) -> list[Any]:
            return gang.run(fn, port, *args, timeout_seconds=_LIMIT_SECONDS)

        def turn(system: str) -> Callable[[], float]:
            def step() -> float:
                steps: list[rank.Taken] = ask(rank.take_step, shape, system)
                sent[system] = max(one.num_bytes for one in steps)
                return max(one.seconds for one in steps)

            return step

        ask(rank.join, each)
        for system in SYSTEMS:
            ask(rank.take_step, shape, system)  # compiles it
        figures = take_turns({system: turn(system) for system in SYSTEMS}, rounds=rounds)
    for system, seconds in figures.items():
        report.add(case, system, STEP, "s", seconds)
        report.add(case, system, SENT, "MB", [sent[system] / 1e6])
    say(f"  {figures}")
    report.against("fsdp_step_processes", case, STEP, ours=OURS, peers=[XLA, HELD, BY_HAND])
    report.against("fsdp_bytes_processes", case, SENT, ours=OURS, peers=[XLA, HELD, BY_HAND], at_least=1 / 1.02)
