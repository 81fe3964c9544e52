"""The folder of a study: what it is, a line for each run, and what is made of them."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast, final

from braidax.errors import ArgumentError
from braidax.spans import Trace

from .runs import Run

FORMAT = "braidax study 2"
"""What the folder of a study says of its own form; one of another form is refused."""

_ABOUT, _RUNS, _WRITTEN, _TRACES, _SCRATCH = "study.json", "runs.jsonl", "written.json", "traces", "scratch"


@final
class StudyFolder:
    """Keeps the runs of a study, so that the same command goes on where it was stopped, however it was.

    A run is a line that is appended at once and made durable; a last line that was cut is taken away. Files that are
    made of runs (`write`) replace only what this folder's study has written itself.

    **Arguments:** `path`: nothing yet, an empty folder, or that of the same study. `about`: what is measured, of what,
    where: JSON by name. The folder of another study is refused.

    **Raises:** `ArgumentError` for a folder with other files, of another version, or of another study: what differs.
    """

    def __init__(self, path: str | Path, about: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._about = cast("dict[str, Any]", json.loads(json.dumps(about)))
        there = next(place for place in (self.path.absolute(), *self.path.absolute().parents) if place.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ArgumentError(f"--out {path}: {there} is no folder that can be written to; give another folder")
        if (self.path / _ABOUT).exists():
            self._check_same()
        elif self.path.exists() and any(self.path.iterdir()):
            names = sorted(one.name for one in self.path.iterdir())
            raise ArgumentError(
                f"--out {path} has files that are of no study ({', '.join(names[:4])}), which stay as they are; give "
                "an empty folder, or another one"
            )
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            _replace(self.path / _ABOUT, json.dumps({"format": FORMAT, **self._about}, indent=1).encode())
        self._runs = self._read_runs()

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs so far."""
        return tuple(self._runs)

    @property
    def about(self) -> dict[str, Any]:
        """What is measured."""
        return self._about

    def append(self, run: Run) -> None:
        """Adds a run, which is durable then."""
        with (self.path / _RUNS).open("ab") as file:
            file.write(run.to_line().encode())
            file.flush()
            os.fsync(file.fileno())
        self._runs.append(run)

    def keep_trace(self, setting: str, trace: Trace, *, is_first: bool) -> None:
        """Keeps the trace of a run under the setting's name: that of the first block, or any where there is none."""
        path = self.path / _TRACES / f"{setting}.json.gz"
        if is_first or not path.exists():
            path.parent.mkdir(exist_ok=True)
            part = path.with_name(f".{os.getpid()}.part.gz")
            trace.save(part)
            part.replace(path)

    @contextlib.contextmanager
    def scratch(self) -> Generator[Path]:
        """Makes an empty folder for checkpoints, and takes it away: nobody keeps them.

        What a killed study has left goes first. A process of it that has not ended yet has a folder of its own.
        """
        path = self.path / _SCRATCH
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(exist_ok=True)
        try:
            yield Path(tempfile.mkdtemp(dir=path)).absolute()
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def write(self, name: str, data: bytes) -> Path:
        """Writes a file that is made of runs, in place of the one before.

        **Raises:** `ArgumentError` for a file of that name that is not what this study has written.
        """
        path, written = self.path / name, self._written()
        if path.exists() and _digest(path.read_bytes()) not in written.get(name, ()):
            raise ArgumentError(
                f"{path} is not as this study wrote it, and stays as it is; move it elsewhere, and run the same command"
            )
        before = written.get(name, [])[-1:]
        written[name] = [*before, _digest(data)]  # first, so that a file is known whenever this is cut short
        _replace(self.path / _WRITTEN, json.dumps(written).encode())
        _replace(path, data)
        return path

    def _written(self) -> dict[str, list[str]]:
        try:
            found = json.loads((self.path / _WRITTEN).read_text())
            return {str(name): [str(one) for one in digests] for name, digests in found.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError) as error:
            raise ArgumentError(
                f"{self.path / _WRITTEN} is no list of what was written ({error}); remove it, and move the reports "
                "of this folder elsewhere"
            ) from error

    def _check_same(self) -> None:
        path = self.path / _ABOUT
        try:
            found = cast("dict[str, Any]", json.loads(path.read_text()))
            kind = found.pop("format", None)
        except (ValueError, AttributeError) as error:
            raise ArgumentError(f"{path} is no JSON of a study ({error}); give another folder as --out") from error
        if kind != FORMAT:
            raise ArgumentError(
                f"{path} is of the version {kind!r}, and this braidax reads and writes {FORMAT!r}; give another folder "
                "as --out, or go on with the braidax that has begun it"
            )
        for name, value in self._about.items():
            if found.get(name) != value:
                raise ArgumentError(
                    f"--out {self.path} has a study with another {name}: {_told(found.get(name), value)}; give another "
                    "folder, or the options that it was begun with"
                )

    def _read_runs(self) -> list[Run]:
        path = self.path / _RUNS
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # the last line was cut when the study was stopped
            with path.open("r+b") as file:
                file.truncate(len(whole))
        lines = whole.decode(errors="replace").splitlines()
        return [Run.from_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _told(found: Any, given: Any) -> str:
    """Returns in words what differs, of JSON."""
    if isinstance(found, dict) and isinstance(given, dict):
        was, now = cast("dict[str, Any]", found), cast("dict[str, Any]", given)
        differing = [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]
        return ", ".join(f"{name} is {_short(was.get(name))}, not {_short(now.get(name))}" for name in differing)
    return f"{_short(found)}, not {_short(given)}"


def _short(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _replace(path: Path, data: bytes) -> None:
    """Puts a file in its place when it is whole and durable."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
