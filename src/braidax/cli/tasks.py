"""Which tasks there are, and what the command line asks them for."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from braidax.cli.run_options import Value
from braidax.data import skipping

if TYPE_CHECKING:
    from braidax.tasks.task import Task

TASKS = ("digits", "wide_resnet", "resnet", "inception_v3", "lm1b", "bert", "dlrm")
"""Each is a function of that name in a module of that name."""

_OPTIONS = {"path": "--data", "preset": "--preset", "image_size": "--image-size"}


def make_task(name: str, out: Path, *, path: Path | None, preset: str | None, image_size: int | None) -> "Task":
    """Returns a task with what was asked for; digits are kept in the folder of the run.

    **Raises:** `typer.BadParameter` for what is no task, and for an option that the task does not know or lacks.
    """
    make, known = _find(name)
    options = {"path": path, "preset": preset, "image_size": image_size}
    given = {option: value for option, value in options.items() if value is not None}
    for option, value in given.items():
        if option not in known:
            raise typer.BadParameter(f"{value}: {name} leaves no such choice", param_hint=_OPTIONS[option])
    if "path" in known and known["path"].default is inspect.Parameter.empty and path is None:
        raise typer.BadParameter(f"{name} needs the path of its data as downloaded", param_hint="--data")
    return make(out / "data") if "folder" in known else make(**given)


def options_of(name: str, *, path: Path | None, preset: str | None, image_size: int | None) -> dict[str, Value]:
    """Returns what a task is made with, by the option's name, with the task's own defaults."""
    preset_of_its_own = _find(name)[1].get("preset")
    if preset is None and preset_of_its_own is not None:
        preset = preset_of_its_own.default
    data = None if path is None else str(path.absolute())
    return {"task": name, "--data": data, "--preset": preset, "--image-size": image_size}


def skipping_bad(task: "Task", out: Path) -> "Task":
    """Returns a task whose bad records are replaced by others, and listed in the folder of the run."""
    ledgers = out / "skipped.jsonl", out / "skipped-test.jsonl"
    sources = task.train, task.test
    train, test = (skipping(source, ledger=ledger) for source, ledger in zip(sources, ledgers, strict=True))
    return replace(task, train=train, test=test)


def _find(name: str) -> tuple[Any, Mapping[str, inspect.Parameter]]:
    if name not in TASKS:
        raise typer.BadParameter(f"{name!r} is no task; there are {', '.join(TASKS)}", param_hint="TASK")
    make: Any = getattr(import_module(f"braidax.tasks.{name}"), name)
    return make, inspect.signature(make).parameters
