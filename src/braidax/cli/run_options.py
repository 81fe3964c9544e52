"""The options of a run, kept beside it, so that a session that goes on with others says so."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from braidax.errors import ArgumentError

FILE = "options.jsonl"
_TASK = "task"
_SEED = "--seed"

Value = str | int | None


@dataclass(frozen=True)
class Compared:
    """What became of the options of a session.

    **Fields:** `seed`: that the run has. `told`: what changed, in a line, or nothing.
    """

    seed: int
    told: str


def check_folder(out: Path) -> None:
    """Raises `ArgumentError` when the folder of a run cannot be made, or not be written to; makes nothing itself."""
    there = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ArgumentError(f"--out {out}: {there} is a file, expected a folder or nothing yet; give another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ArgumentError(f"--out {out}: nothing can be written to {there}; give another folder, or change its mode")


def compare(out: Path, options: Mapping[str, Value], *, saved: bool) -> Compared:
    """Compares the options of a session with those of the one before.

    **Arguments:** `out`: the folder of the run. `options`: by name, with `task` and `--seed`. `saved`: whether the run
    has a checkpoint, so that it goes on; without one it begins anew.

    **Raises:** `ArgumentError` when the folder has another task's run, or its file of options is none.
    """
    before = _last(out / FILE)
    given = options[_SEED]
    assert isinstance(given, int)
    if not before:
        return Compared(given, "")
    if before.get(_TASK) != options[_TASK]:
        raise ArgumentError(
            f"--out {out} has a run of the task {before.get(_TASK)!r}, and not of {options[_TASK]!r}; give another "
            "folder"
        )
    if not saved:
        return Compared(given, f"{out} has no checkpoint yet: the run begins anew")
    seed = before.get(_SEED)
    kept = seed if isinstance(seed, int) else given
    changed = [
        f"{name} {_told(value)} instead of {_told(before.get(name))}"
        for name, value in options.items()
        if name != _SEED and value != before.get(name)
    ]
    told = f"{out} goes on with other options: {', '.join(changed)}" if changed else ""
    if kept != given:
        told += f"; {_SEED} stays" if told else f"{out} keeps its {_SEED}"
        told += f" {kept}, the order of samples that was begun with, instead of {given}"
    return Compared(kept, told)


def keep(out: Path, options: Mapping[str, Value]) -> None:
    """Adds a line with the options to the file in the folder of a run, unless it ends with the same."""
    if _last(out / FILE) != dict(options):
        with (out / FILE).open("a") as file:
            file.write(json.dumps({**options, "time": time.time()}) + "\n")


def _last(path: Path) -> dict[str, Value]:
    """Returns the last line of options, without its time; empty when there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        fields = json.loads(lines[-1]) if lines else {}
    except ValueError as error:
        raise ArgumentError(
            f"{path} ends with {lines[-1][:40]!r}: expected a line of JSON; remove that line"
        ) from error
    fields.pop("time", None)
    return fields


def _told(value: Value) -> str:
    return "none" if value is None else str(value)
