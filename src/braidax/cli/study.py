"""`braidax study`: measures a case, shows how far it is, and writes its report."""

import os
import platform
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from braidax import __version__
from braidax.cli.cases import find_case
from braidax.cores import usable_cores
from braidax.gang.launch import find_gpus
from braidax.tune.study import (
    NUM_STAGES,
    PAIRS,
    Case,
    Design,
    Levels,
    Place,
    StudyFolder,
    Written,
    parse_limits,
    parse_pairs,
    run_study,
    sweeps_of,
    write_report,
)
from braidax.tune.study import Progress as Done
from braidax.tune.study.report.sentences import of_best, of_hypothesis

_QUICK, _FULL = (6, 5), (8, 30)  # blocks, and steps of a run
_PLAIN_SECONDS = 5.0  # between lines where there is no terminal


@dataclass(frozen=True)
class Effort:
    """How much is measured. **Fields:** `blocks`, `steps`: in place of the study's own. `seed`: of the order."""

    blocks: int | None = None
    steps: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for, as it says it."""

    case: str
    data: Path | None
    quick: bool
    processes: int
    limit: str | None
    pairs: str | None
    effort: Effort


def study(wanted: Wanted, out: Path) -> None:
    """Measures what is missing in a folder and writes its report; Ctrl-C ends it with `typer.Exit(130)`.

    **Raises:** any error of braidax.
    """
    console = Console()
    pairs = tuple(PAIRS) if wanted.pairs is None else parse_pairs(wanted.pairs)
    limits, place = parse_limits(wanted.limit), Place(processes=wanted.processes)
    case = find_case(wanted.case, wanted.data, quick=wanted.quick)
    design = _design(wanted, pairs, case.batch_size // (place.devices // NUM_STAGES))
    about = _about(case, design, place, str(limits))
    folder = StudyFolder(out, about)
    num_runs = len(design.settings) * design.num_blocks
    before = sum(run.block < design.num_blocks for run in folder.runs)
    kept = f", {before} of them done before" if before else ""
    blocks = f"{design.num_blocks} block{'s' if design.num_blocks > 1 else ''}"
    console.print(f"{case.title}: {len(design.settings)} settings, {blocks}, {num_runs} runs{kept}")
    for name, fact in case.facts.items():
        console.print(f"  {name}: {fact}", highlight=False, soft_wrap=True)
    try:
        with _shown(console) as tell:
            run_study(case, design, folder, place=place, limits=limits, tell=tell)
    except KeyboardInterrupt:
        num_kept = len(StudyFolder(out, about).runs)  # a run may have been written right before
        console.print(f"interrupted: {out} keeps {num_kept} of {num_runs} runs; run the same command to go on")
        raise typer.Exit(130) from None
    _tell(write_report(folder, case, design), design, console)


def _design(wanted: Wanted, pairs: tuple[str, ...], most_microbatches: int) -> Design:
    levels, effort = Levels(), wanted.effort
    num_blocks, num_steps = _QUICK if wanted.quick else _FULL
    first = Design(pairs, levels, (), effort.blocks or num_blocks, effort.steps or num_steps, effort.seed)
    sweeps = sweeps_of(levels, first.factors, quick=wanted.quick, most_microbatches=most_microbatches)
    return replace(first, sweeps=sweeps)


def _about(case: Case, design: Design, place: Place, limits: str) -> dict[str, Any]:
    """Returns what makes a study this one: all of it has to be the same for a folder to go on."""
    measured = {
        "pairs": list(design.pairs),
        "levels": asdict(design.levels),
        "settings": [setting.name for setting in design.settings],
        "steps": design.num_steps,
        "seed": design.seed,
    }
    machine = {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "processes": place.processes,
        "devices": f"{len(gpus)} GPUs" if (gpus := find_gpus()) else f"{place.devices} virtual CPU devices",
        "limits": limits,
        "versions": f"braidax {__version__}, JAX {jax.__version__}, Python {platform.python_version()}",
    }
    return {"case": {"name": case.name, **case.facts}, "design": measured, "machine": machine}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@contextmanager
def _shown(console: Console) -> Generator[Any, None, None]:
    """Yields what to tell of progress: a bar on a terminal, and a line now and then elsewhere."""
    if console.is_terminal:
        columns = (TextColumn("{task.percentage:>3.0f} %"), BarColumn(30), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)

            def draw(done: Done) -> None:
                words = f"{_left(done)}  {done.doing}"
                bar.update(task, total=done.total, completed=done.done, description=words)

            yield draw
        return
    last = -_PLAIN_SECONDS

    def write(done: Done) -> None:
        nonlocal last
        if time.monotonic() - last >= _PLAIN_SECONDS or done.done == done.total:
            last = time.monotonic()
            console.print(f"{done.done} of {done.total}  {_left(done)}  {done.doing}", highlight=False, soft_wrap=True)

    yield write


def _left(done: Done) -> str:
    minutes, seconds = divmod(round(done.left_seconds), 60)
    return f"{minutes}:{seconds:02d} left"


def _tell(written: Written, design: Design, console: Console) -> None:
    for one in written.findings.hypotheses:
        console.print(
            f"{one.pair}: all on worse than the best single one? {of_hypothesis(one)}", highlight=False, soft_wrap=True
        )
    console.print(of_best(written.findings, design), highlight=False, soft_wrap=True)
    names = {"report": written.page, "poster": written.poster, "results": written.results, "tables": written.tables[0]}
    for name, path in names.items():
        console.print(f"{name:<8}{path}", highlight=False, soft_wrap=True)
