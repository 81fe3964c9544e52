"""What `braidax inspect` does with the folder of a run, or of one checkpoint."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from braidax.checkpoint.format.folders import LOCK_FILE, Found, checkpoints, misnamed
from braidax.checkpoint.format.manifest import Entry, OtherFormat, data_file, manifest_file
from braidax.checkpoint.format.reading import Content, Reader, read_content
from braidax.checkpoint.snapshot.boxes import Box, volume, whole
from braidax.errors import ArgumentError, CheckpointError
from braidax.parallel.plan.plan import Plan

Check = Literal["newest", "all", "none"]
"""Of which checkpoints the arrays are read and their checksums compared; the others' manifests and sizes are."""

_BLOCK_BYTES = 16 * 2**20
_MAX_NAMED = 5
_METRICS = "metrics.jsonl"  # that `braidax train` writes, and the tutorial's `Report`
_TAIL_BYTES = 1 << 16  # of metrics that are looked at
_UNSHOWN = frozenset({"step", "time"})


def is_checkpoint(path: Path) -> bool:
    """Says whether a path is a folder of checkpoints, of one, or of such folders, without looking into files."""
    return path.is_dir() and (_is_any(path.absolute()) or bool(_below(path.absolute())))


def _is_any(folder: Path) -> bool:
    if _is_one(folder) or any(_is_one(found.path) for found in checkpoints(folder)):
        return True
    return (folder / LOCK_FILE).exists() and all(child.name.startswith(".") for child in folder.iterdir())


def _below(folder: Path) -> list[Path]:
    """Returns the folders of checkpoints in that of a run, or of several: those that a `Checkpointer` has locked."""
    inside = sorted(child for child in folder.iterdir() if child.is_dir())
    candidates = [each for child in inside for each in (child, child / "checkpoints")]
    return [each for each in candidates if (each / LOCK_FILE).is_file() and _is_any(each)]


def inspect_checkpoint(path: Path, *, check: Check, console: Console) -> None:
    """Prints which checkpoints there are and whether they verify, and the leaves of the newest that can be read.

    **Arguments:** `path`: the folder of a run, or of one checkpoint, which then counts as the newest; or of several
    runs, of which it prints a line each. `check`: whose arrays are read; of several runs none are.

    **Raises:** `CheckpointError` when there is none, or saying what is wrong, with files and leaves, after all is
    printed.
    """
    folder = path.absolute()
    below = [] if _is_any(folder) else _below(folder)
    if len(below) > 1:
        _inspect_runs(folder, below, console)
        return
    if below:
        (folder,) = below
        console.print(f"checkpoints in {folder}", markup=False, highlight=False, soft_wrap=True)
    one = _is_one(folder)
    unfinished = 0 if one else sum(1 for _ in folder.glob(".step-*.unfinished"))
    listed = [_found(folder)] if one else checkpoints(folder)
    chosen = {"newest": 1, "all": len(listed), "none": 0}[check]
    seen: list[_Seen] = []
    for number, found in enumerate(listed):
        looked = _look(found, console if number < chosen else None)
        if not one:
            looked = _named(looked)
        if found.path.exists():  # its run may have removed it
            seen.append(looked)
    if seen:
        console.print(_overview(seen))
    if told := _last_metrics(folder):
        console.print(told, markup=False, highlight=False, soft_wrap=True)
    if unfinished:
        console.print(f"{unfinished} unfinished: being written, or left by a crash")
    shown = next((each for each in seen if each.content is not None and each.verdict != "other name"), None)
    if shown is not None and shown.content is not None:
        console.print(_leaves(shown.content, shown.damaged))
        for name, text in shown.content.manifests[0].notes.items():
            console.print(_note(name, text), markup=False, highlight=False, soft_wrap=True)
    if not seen:
        raise CheckpointError(f"{folder}: has no checkpoint yet; give the folder of a run that has saved one")
    troubles = [trouble for each in seen for trouble in each.troubles]
    if troubles:
        raise CheckpointError("\n".join(troubles))


def _last_metrics(folder: Path) -> str:
    """Returns what the metrics of a run say of its last step, empty if there are none beside its checkpoints."""
    file = (folder.parent if folder.name == "checkpoints" else folder) / _METRICS
    if not file.is_file():
        return ""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        lines = opened.read().splitlines()
    step, values = None, dict[str, Any]()
    for line in reversed(lines):
        try:
            fields: Any = json.loads(line)
        except ValueError:  # the first one may be cut, and the last be being written
            continue
        if not isinstance(fields, dict) or "resumed" in fields:
            continue
        found = cast("dict[str, Any]", fields)
        if not isinstance(found.get("step"), int):
            continue
        if step is not None and found["step"] != step:
            break
        step = found["step"]
        values = {**found, **values}
    shown = [
        f"{name} {value:.6g}"
        for name, value in values.items()
        if name not in _UNSHOWN and isinstance(value, int | float)
    ]
    return "" if step is None else f"{file.name}: step {step:,}  {'  '.join(shown)}"


def _note(name: str, text: str) -> str:
    if name == "plan":
        with contextlib.suppress(ArgumentError):  # a note of the user's own
            return f"plan:\n{Plan.from_json(text)}"
    return f"{name}: {text}"


def _inspect_runs(folder: Path, runs: Sequence[Path], console: Console) -> None:
    table = Table("checkpoints in", "newest step", "checkpoints", "bytes", "age", "newest is")
    for run in runs:
        listed = checkpoints(run)
        looked = (_named(_look(found, None)) for found in listed)
        newest = next((each for each in looked if each.verdict != "other name"), None)
        step, age, verdict = (
            ("", "", "") if newest is None else (_step(newest), _age(newest.found.path), newest.verdict)
        )
        num_bytes = sum(_bytes_on_disk(found.path) for found in listed)
        table.add_row(str(run.relative_to(folder)), step, str(len(listed)), f"{num_bytes:,}", age, verdict)
    console.print(table)
    console.print("give one of these folders to see more of it", markup=False)


def _named(seen: "_Seen") -> "_Seen":
    """Returns what was seen of a checkpoint as `restore` sees it, which does not take it under another's name."""
    words = "" if seen.content is None else misnamed(seen.found.path, seen.content.step)
    return replace(seen, verdict="other name", troubles=(words, *seen.troubles)) if words else seen


@dataclass(frozen=True)
class _Seen:
    """A checkpoint. **Arguments:** `damaged`: leaves that cannot be restored. `troubles`: what is wrong with it."""

    found: Found
    verdict: str
    content: Content | None
    damaged: frozenset[str]
    troubles: tuple[str, ...]


@contextlib.contextmanager
def _progress(console: Console, name: str, num_bytes: int) -> Generator[Callable[[int], None]]:
    """Shows on a terminal how far reading is; gives what is called with the number of bytes that were read."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(f"checking {name}", total=num_bytes)
        yield lambda advance: progress.advance(task, advance)


def _is_one(path: Path) -> bool:
    if (path / data_file(0)).is_file():
        return True
    return (path / manifest_file(0)).is_file() and any(found.path == path for found in checkpoints(path.parent))


def _found(folder: Path) -> Found:
    """Returns a checkpoint by its folder, which may have been renamed; its step is then in the manifest."""
    named = [found for found in checkpoints(folder.parent) if found.path == folder]
    return named[0] if named else Found(-1, 0, folder)


def _look(found: Found, console: Console | None) -> _Seen:
    """Looks at a checkpoint. **Arguments:** `console`: shows the progress of reading all; None to read no arrays."""
    try:
        content = read_content(found.path)
    except OtherFormat as error:
        return _Seen(found, "other format", None, frozenset(), (str(error),))
    except CheckpointError as error:
        return _Seen(found, "damaged", None, frozenset(), (str(error),))
    damaged = _of_wrong_size(content)
    if console is not None:
        damaged |= _of_wrong_content(content, damaged, console)
    troubles = _grouped(damaged)
    verdict = "damaged" if troubles else "whole" if console is None else "verified"
    return _Seen(found, verdict, content, frozenset(path for path in damaged if path), troubles)


def _of_wrong_size(content: Content) -> dict[str, str]:
    """Returns why leaves cannot be restored, by path, as the sizes of files tell it."""
    damaged: dict[str, str] = {}
    for process, manifest in enumerate(content.manifests):
        file, expected = content.folder / data_file(process), manifest.data.num_bytes
        try:
            num_bytes = file.stat().st_size
        except OSError as error:
            reason = f"{file}: cannot be read: {error}"
        else:
            if num_bytes == expected:
                continue
            reason = f"{file}: is of {num_bytes} bytes, expected {expected}: it was truncated or changed"
        damaged |= {tensor.path: reason for tensor in manifest.tensors} or {"": reason}
    return damaged


def _of_wrong_content(content: Content, damaged: dict[str, str], console: Console) -> dict[str, str]:
    """Returns why more leaves cannot be restored, by path, as their checksums tell it."""
    found: dict[str, str] = {}
    entries = [entry for path, entry in content.entries.items() if entry.leaf.dtype and path not in damaged]
    num_bytes = sum(map(_num_bytes, entries))
    with Reader(content) as reader, _progress(console, content.folder.name, num_bytes) as progress:
        for entry in entries:
            try:
                for block in _blocks(whole(entry.shape), np.dtype(entry.dtype).itemsize):
                    progress(reader.read(entry, block).nbytes)
            except CheckpointError as error:
                found[entry.leaf.path] = str(error)
    return found


def _blocks(box: Box, itemsize: int) -> Iterator[Box]:
    """Gives parts of a box that fit into memory, in the order of the file."""
    dim = next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), None)
    if dim is None or itemsize * volume(box) <= _BLOCK_BYTES:
        yield box
        return
    start, stop = box[dim]
    middle = (start + stop) // 2
    for bounds in ((start, middle), (middle, stop)):
        yield from _blocks((*box[:dim], bounds, *box[dim + 1 :]), itemsize)


def _grouped(damaged: dict[str, str]) -> tuple[str, ...]:
    """Returns every reason once, with the leaves that it is for."""
    paths: dict[str, list[str]] = {}
    for path, reason in damaged.items():
        paths.setdefault(reason, []).append(path)
    troubles: list[str] = []
    for reason, those in paths.items():
        named = [repr(path) for path in those if path]
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        is_named = not named or (len(named) == 1 and f"leaf {named[0]}" in reason)
        troubles.append(reason if is_named else f"{reason}; leaves {', '.join(named[:_MAX_NAMED])}{more} are lost")
    return tuple(troubles)


def _overview(seen: Sequence[_Seen]) -> Table:
    table = Table("step", "folder", "processes", "braidax", "age", "bytes", "state", title_justify="left")
    for each in seen:
        about = None if each.content is None else each.content.manifests[0].about
        table.add_row(
            _step(each),
            each.found.path.name,
            "?" if about is None else str(about.num_processes),
            "?" if about is None else about.version,
            _age(each.found.path),
            f"{_bytes_on_disk(each.found.path):,}",
            each.verdict,
        )
    return table


def _step(seen: _Seen) -> str:
    step = seen.found.step if seen.content is None else seen.content.step
    return f"{step:,}" if step >= 0 else "?"


def _leaves(content: Content, damaged: frozenset[str]) -> Table:
    entries = content.entries.values()
    title = f"{len(entries):,} leaves of {content.folder.name}, {sum(map(_num_bytes, entries)):,} bytes"
    table = Table("leaf", "dtype", "global shape", "bytes", "rows", "value", title=title, title_justify="left")
    for entry in entries:
        leaf = entry.leaf
        table.add_row(
            leaf.path,
            leaf.dtype or f"Python {leaf.kind}",
            str(list(leaf.shape)) if leaf.dtype else "",
            f"{_num_bytes(entry):,}" if leaf.dtype else "",
            "" if entry.padded_rows is None else f"{entry.padded_rows:,}",
            "damaged" if leaf.path in damaged else ("" if leaf.dtype else str(entry.number)),
        )
    return table


def _num_bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * np.dtype(entry.dtype).itemsize if entry.leaf.dtype else 0


def _bytes_on_disk(folder: Path) -> int:
    num_bytes = 0
    with contextlib.suppress(FileNotFoundError):  # it is being removed
        for file in folder.iterdir():
            num_bytes += file.stat().st_size
    return num_bytes


def _age(folder: Path) -> str:
    """Returns how long ago a checkpoint was finished, as the file system tells it."""
    manifest = folder / manifest_file(0)
    try:
        finished = (manifest if manifest.exists() else folder).stat().st_mtime
    except FileNotFoundError:
        return "?"
    seconds = max(0, int(time.time() - finished))
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // smaller_size} {smaller}"
    return f"{seconds} s"
