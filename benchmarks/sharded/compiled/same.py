"""Whether steps that replicate, or split by rows, compile to what they did before there was `FullySharded`.

The cases of `texts` are compiled by both versions in processes of their own. Programs are the same when they compute
the same from the same arguments, whatever names their values have and in which order they are written.
"""

import collections
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, say
from braidax.program import collectives_of, total_sent
from braidax.program.compiled.hlo import Computation, Module

BEFORE = "4f0bfde"  # the last commit before a step became a list of passes and feeds
CHANGED = {
    "microbatches": "each gradient crosses the devices once an update",
    "Adam": "rows that were not read catch up in one move",
    "beside DataParallel": "axes of the batch beyond a table's repeat no exchange",
    "Hybrid": "the loop over rounds of an exchange holds the first one, and the last is sent behind it",
}  # what was changed on purpose since, by a part of the name of a case: there fewer bytes are sent, or as many
_ROOT = Path(__file__).resolve().parents[3]
_QUICK_MACHINE_CODE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_PARAMETER = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .* parameter\((\d+)\)", re.MULTILINE)
_SAID = re.compile(r",? (?:metadata|frontend_attributes|control-predecessors)=\{[^{}]*\}|,? channel_id=\d+")
_NAME = re.compile(r"%([\w.\-]+)")


def compare(report: Report, before: Path | None, *, first: int | None = None) -> None:
    """Compiles cases by this version and by an earlier one, and claims that none differs but those of `CHANGED`.

    **Arguments:** `before`: a checkout of the earlier version; None: that of `BEFORE`, by git. `first`: so many cases.
    """
    try:
        with _checkout(before) as older:
            old, new = (_texts(folder, first) for folder in (older, _ROOT))
    except subprocess.CalledProcessError as error:
        why = (error.stderr or b"").decode().strip() or str(error)
        report.not_measured("same", "<= 0", f"{BEFORE} cannot be compiled here: {why}")
        return
    different, ratios = 0, list[float]()
    for case, programs in new.items():
        found = {name: (old[case][name], program) for name, program in programs.items()}
        told = {name: words for name, (one, other) in found.items() if (words := difference(one, other))}
        why = next((why for part, why in CHANGED.items() if part in case), "")
        different += 0 if why else len(told)
        sent = [sum(_sent(pair[at]) for pair in found.values()) for at in (0, 1)]
        if why and told:
            ratios.append(sent[1] / sent[0])
        for at, system in enumerate(("before", "now")):
            memory = max(pair[at]["memory"] for pair in found.values())
            report.add("compiled as before", system, "sent by a device, a step", "KB", [sent[at] / 1e3], at=case)
            report.add("compiled as before", system, "arguments and temporaries", "KB", [memory / 1e3], at=case)
        report.add("compiled as before", "now", "programs that differ", "", [len(told)], at=case)
        for name, words in told.items():
            report.note(f"{case}: {name} differ from those of {BEFORE} ({why or 'not on purpose'}): {words}")
    report.at_most("same", different, 0)
    if ratios:
        report.at_most("same_bytes", max(ratios), 1)


def _sent(program: Mapping[str, Any]) -> float:
    return sum(total_sent(collectives_of(program["text"])).values())


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Returns in which operations two programs differ, "" for one and the same."""
    one, other = Module(old["text"]), Module(new["text"])
    if _Fingerprints(old["text"], one).of(one.entry) == _Fingerprints(new["text"], other).of(other.entry):
        return ""
    before, now = _operations(one), _operations(other)
    told = [f"{now[name] - before[name]:+} {name}" for name in sorted(before | now) if now[name] != before[name]]
    return ", ".join(told) or "the same operations, otherwise connected"


class _Fingerprints:
    """What tells computations apart: their operations and how these are connected, not what they are called."""

    def __init__(self, text: str, module: Module) -> None:
        self._module, self._numbers = module, dict(_PARAMETER.findall(text))
        self._known: dict[str, str] = {}

    def of(self, computation: Computation) -> str:
        """Returns that of a computation."""
        if computation.name not in self._known:
            values: dict[str, str] = {}
            for one in computation.instructions:
                operands = ",".join(values[name] for name in one.operands)
                told = _NAME.sub(self._called, _SAID.sub("", one.attributes))
                number = self._numbers[one.name] if one.opcode == "parameter" else ""
                whole = f"{one.opcode}|{one.shape}|{operands}|{one.literal}|{number}|{told}"
                values[one.name] = hashlib.sha1(whole.encode()).hexdigest()
            self._known[computation.name] = values[computation.root.name]
        return self._known[computation.name]

    def _called(self, found: re.Match[str]) -> str:
        computation = self._module.computations.get(found[1])
        return "" if computation is None else self.of(computation)


def _operations(module: Module) -> collections.Counter[str]:
    """How many operations of each kind a program is written with."""
    return collections.Counter(one.opcode for each in module.computations.values() for one in each.instructions)


def _texts(folder: Path, first: int | None) -> dict[str, Any]:
    """Compiles the cases by the version in a folder."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "texts.json"
        paths = os.pathsep.join(map(str, (folder / "src", _ROOT)))
        flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _QUICK_MACHINE_CODE, "PYTHONPATH": paths}
        count = [] if first is None else [str(first)]
        command = [sys.executable, "-m", "benchmarks.sharded.compiled.texts", str(file), *count]
        say(f"compiled by {folder} …")
        subprocess.run(command, cwd=_ROOT, env={**os.environ, **flags}, check=True)
        found = json.loads(file.read_text())
    assert Path(found["braidax"]).is_relative_to(folder), f"{found['braidax']} was compiled by, not {folder}"
    return found["cases"]


@contextmanager
def _checkout(given: Path | None) -> Generator[Path]:
    """Yields a folder with the sources of the earlier version."""
    if given is not None:
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory() as place:
        packed = Path(place) / "src.tar"
        subprocess.run(["git", "archive", "-o", str(packed), BEFORE, "src"], cwd=_ROOT, check=True, capture_output=True)
        with tarfile.open(packed) as archive:
            archive.extractall(place, filter="data")
        yield Path(place).resolve()
