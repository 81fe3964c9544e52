"""Metrics on disk, as lines of JSON."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from braidax.errors import ArgumentError
from braidax.report.pace import Done, rates

_MAX_LINE_BYTES = 1 << 20  # far more than a step has metrics


class MetricsFile:
    """A line of JSON per step and per note, behind those that are there; nothing that is there is taken away.

    A session that goes on begins with a line that has `resumed`, so that steps that are done again can be told from
    those before.

    **Arguments:** `path`: made if it is missing, with its folder. `first_step`: steps done before this session.

    **Raises:** `ArgumentError` for a path that is no such file, or cannot be one.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                _check_ours(file, path)
                num_bytes, torn = file.tell(), _torn(file)
            if torn is not None:
                _mend(path, num_bytes - len(torn), torn)
            self._file = path.open("a")
        except OSError as error:
            raise ArgumentError(
                f"metrics={str(path)!r} cannot be written ({error.strerror}): expected a file in a folder, which is "
                "made if it is missing; give another path"
            ) from error
        if num_bytes or first_step:
            self._write({"step": first_step, "time": time.time(), "resumed": True})

    def step(self, done: Done) -> None:
        """Writes the line of a step."""
        self.note(done.step, done.epoch, {**done.metrics, **rates(done.pace)})

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Writes a line of values."""
        numbers = {name: _json_number(value) for name, value in values.items()}
        self._write({"step": step, "epoch": epoch, "time": time.time(), **numbers})

    def say(self, line: str) -> None:
        """Writes nothing: it is for people."""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, fields: Mapping[str, object]) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()


def _check_ours(file: IO[bytes], path: Path) -> None:
    """Raises `ArgumentError` when a file has contents, and they are no metrics. Leaves the file at its end."""
    file.seek(0)
    first = file.readline(_MAX_LINE_BYTES)
    ours = _is_metrics(first) if first.endswith(b"\n") else first.startswith(b'{"step"')
    if first and not ours:
        raise ArgumentError(
            f"metrics={str(path)!r} is there and begins with {first[:40]!r}: expected a file of metrics, lines of JSON "
            'with "step", to add to; give another path'
        )
    file.seek(0, 2)


def _is_metrics(line: bytes) -> bool:
    try:
        fields = json.loads(line)
    except ValueError:
        return False
    return isinstance(fields, dict) and bool({"step", "torn"} & set(fields))


def _torn(file: IO[bytes]) -> bytes | None:
    """Returns the last line of a file if a crash has cut it short, else None."""
    end = file.seek(0, 2)
    file.seek(max(0, end - _MAX_LINE_BYTES))
    tail = file.read().rpartition(b"\n")[2]
    return tail or None


def _mend(path: Path, start: int, torn: bytes) -> None:
    """Ends a line that was cut short: what there is of it becomes the value of `torn`, so that all lines are JSON."""
    line = torn if _is_metrics(torn) else json.dumps({"torn": torn.decode(errors="replace")}).encode()
    with path.open("r+b") as file:
        file.seek(start)
        file.write(line + b"\n")  # at least as long as what it replaces


def _json_number(value: float) -> float | str:
    """JSON knows neither NaN nor infinity: they are written as strings, which `float` reads back."""
    return value if math.isfinite(value) else str(value)
