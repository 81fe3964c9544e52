"""The diary of a tuner: what it tried, what that gained, and what became of it; kept in a file across restarts."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Literal, get_args

from braidax.errors import ArgumentError

Verdict = Literal["kept", "reverted", "set", "taken over", "looked again"]
_HEADER = {"braidax": "tuning", "version": 1}
_MAX_BYTES = 64 << 20  # a day of trials has less than one of them


@dataclass(frozen=True)
class Entry:
    """What became of one setting.

    **Fields:** `step`: updates that the loop had made. `knob`: which one, empty where an entry is about all. `before`,
    `after`: its values; None where a knob has no limit. `verdict`: `"kept"` or `"reverted"` after a trial, `"set"` by
    what was measured, `"taken over"` from the diary of an earlier session, `"looked again"` after a change of the run.
    `why`: in words.
    """

    step: int
    knob: str
    before: float | None
    after: float | None
    verdict: Verdict
    why: str

    def __str__(self) -> str:
        moved = f"{self.knob} {_told(self.before)} → {_told(self.after)}: " if self.knob else ""
        return f"step {self.step}: {moved}{self.verdict}: {self.why}"


class Diary:
    """The entries of a tuner, oldest first; `print` shows them.

    **Arguments:** `path`: a file of JSON lines, made if it is missing, with its folder; entries are added to those that
    are there. None keeps them in memory only.

    **Raises:** `ArgumentError` for a file that is no diary, or one of another version; it stays as it is.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._entries: list[Entry] = []
        if self._path is not None:
            self._entries = _opened(self._path)

    def add(self, entry: Entry) -> None:
        """Adds an entry, also to the file. **Raises:** `OSError` where the file cannot be written any more."""
        self._entries.append(entry)
        if self._path is not None:
            _append(self._path, asdict(entry))

    @property
    def settings(self) -> dict[str, float | None]:
        """The value that each knob was left with."""
        found: dict[str, float | None] = {}
        for entry in self._entries:
            if entry.knob:
                found[entry.knob] = entry.before if entry.verdict == "reverted" else entry.after
        return found

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __str__(self) -> str:
        return "\n".join(map(str, self._entries)) or "nothing was tried yet"


def _opened(path: Path) -> list[Entry]:
    """Returns the entries of a file, which is made where there is none; a last line that a crash cut short is left."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if file.tell() > _MAX_BYTES:
                raise _refused(path, f"has {file.tell():,} bytes, and at most {_MAX_BYTES:,} are read")
            file.seek(0)
            text = file.read()
            if text and not text.endswith(b"\n"):
                file.write(b"\n")
    except OSError as error:
        raise ArgumentError(
            f"diary={str(path)!r} cannot be written ({error.strerror}): expected a file in a folder, which is made if "
            "it is missing; give another path"
        ) from error
    lines = text.splitlines()
    if not lines:
        _append(path, _HEADER)
        return []
    header = _parsed(lines[0])
    if header is None or header.get("braidax") != _HEADER["braidax"]:
        raise _refused(path, f"begins with {lines[0][:40]!r}")
    if header != _HEADER:
        raise _refused(path, f"is of version {header.get('version')!r}")
    found = [_entry(line) for line in lines[1:]]
    return [entry for entry in found if entry is not None]


def _refused(path: Path, found: str) -> ArgumentError:
    return ArgumentError(
        f"diary={str(path)!r} {found}: expected the diary of a tuner, version {_HEADER['version']}; it stays as it is: "
        "give another path, or move it away"
    )


def _append(path: Path, fields: Mapping[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _entry(line: bytes) -> Entry | None:
    """Returns the entry of a line, None for a line that is none."""
    fields = _parsed(line) or {}
    are_numbers = all(_is_number(fields.get(name)) for name in ("before", "after"))
    is_told = all(isinstance(fields.get(name), str) for name in ("knob", "why")) and type(fields.get("step")) is int
    if not are_numbers or not is_told or fields.get("verdict") not in get_args(Verdict):
        return None
    return Entry(**{field.name: fields.get(field.name) for field in dataclass_fields(Entry)})  # pyright: ignore


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _told(value: float | None) -> str:
    return "no limit" if value is None else f"{value:,.6g}"
