"""The systems of a case, each with its processes, brought to equal work."""

import math
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager

from benchmarks.harness import Report
from benchmarks.pipedream.group import Failed, Group, group
from benchmarks.pipedream.peers import System

_SAME = 1e-3  # of losses: what rounding and other orders of sums leave


@contextmanager
def running(report: Report, case: str, systems: Mapping[str, System]) -> Generator[dict[str, Group]]:
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


def warmed(running: Mapping[str, Group], warmup: int) -> None:
    """Lets each system take its first steps. **Raises:** `ValueError` for losses that are not those of the others."""
    losses: dict[str, list[float]] = {}
    for name, one in running.items():
        told = [one.ask("step") for _ in range(warmup)]
        losses[name] = [next(each.loss for each in all_of if each.loss is not None) for all_of in told]
        first = next(iter(losses.values()))
        if not all(math.isclose(mine, its, rel_tol=_SAME) for mine, its in zip(losses[name], first, strict=True)):
            raise ValueError(f"{name} has losses {losses[name]}, and {next(iter(losses))} has {first}: not equal work")
