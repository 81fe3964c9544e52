"""Writes `benchmarks/README.md` from `results/*.json`, each benchmark's `notes.md`, and `reasons.toml`.

`python -m benchmarks.page` writes it; nobody edits it by hand. A benchmark without results is on it, too: as not run.
"""

import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.claims import Claim, Comparison
from benchmarks.harness.files import write_whole
from benchmarks.harness.machine import summary
from benchmarks.harness.report import FORM
from benchmarks.harness.rows import Row, ranged

FOLDER = Path(__file__).parent
NAMES = (
    "naive",
    "shuffle",
    "formats",
    "parax",
    "parallax",
    "sharded",
    "sharded.compiled",
    "rotated",
    "pipedream",
    "checkfreq",
    "comm",
    "cylon",
    "servers",
    "balance",
)
NO_REASON = "not known yet"


class Result:
    """What one run has left. **Arguments:** `path`: of its file. **Raises:** `ValueError` if it is no whole run."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        if content.get("form") != FORM or content.get("quick") is not False:
            raise ValueError(f"{path}: expected a whole run of form {FORM}, found {content.get('form')} or --quick")
        self.name: str = content["benchmark"]
        self.machine: dict[str, Any] = content["machine"]
        self.notes: list[str] = content["notes"]
        self.rows = [_row(row) for row in content["rows"]]
        self.claims = [_claim(claim) for claim in content["claims"]]


def page(folder: Path, names: Sequence[str] = NAMES) -> str:
    """Returns the page.

    **Arguments:** `folder`: with `results/`, `reasons.toml`, `opening.md`, and by name a folder with `notes.md`.
    `names`: of the benchmarks, in order.
    """
    results = {name: Result(path) for name in names if (path := folder / "results" / f"{name}.json").exists()}
    reasons: dict[str, Any] = tomllib.loads((folder / "reasons.toml").read_text())
    parts = [(folder / "opening.md").read_text().rstrip(), "## Where a peer wins", _lost(results, reasons)]
    for name in names:
        parts.append(f"## {name}")
        notes = folder.joinpath(*name.split("."), "notes.md")
        parts += [notes.read_text().rstrip()] if notes.exists() else []
        parts += _measured(results[name], folder) if name in results else [_not_run(reasons.get(name, {}))]
    return "\n\n".join(part for part in parts if part) + "\n"


def unneeded(folder: Path, names: Sequence[str] = NAMES) -> list[str]:
    """Returns the reasons of claims that hold in every line, or that are not made any more."""
    found: list[str] = []
    for benchmark, claims in tomllib.loads((folder / "reasons.toml").read_text()).items():
        path = folder / "results" / f"{benchmark}.json"
        if benchmark not in names:
            found.append(f"reasons.toml: there is no benchmark {benchmark!r}")
        elif path.exists():
            fallen = {claim.name for claim in Result(path).claims if claim.lost or claim.holds is False}
            unknown = [name for name, reason in claims.items() if isinstance(reason, dict) and name not in fallen]
            found += [f"reasons.toml: {benchmark}.{name} needs no reason" for name in unknown]
    return found


def main() -> int:
    write_whole(FOLDER / "README.md", page(FOLDER))
    for line in unneeded(FOLDER):
        print(line, file=sys.stderr)
    print(f"{FOLDER / 'README.md'} is written", file=sys.stderr)
    return 0


def _lost(results: Mapping[str, Result], reasons: Mapping[str, Any]) -> str:
    """Every comparison with a line in which the best peer is better than ours."""
    lines = [
        [name, _what(claim), claim.ours, _lines(claim.lost), *_reason(reasons, name, claim)]
        for name, result in results.items()
        for claim in result.claims
        if claim.lost
    ]
    fallen = [
        [name, f"`{claim.name}`", str(claim), claim.target, *_reason(reasons, name, claim)]
        for name, result in results.items()
        for claim in result.claims
        if claim.holds is False and not claim.lost
    ]
    if not results:
        return "No benchmark was run yet in the form of this page."
    said = []
    without = [name for name in NAMES if name not in results]
    if without:
        said.append(f"Not run yet, so that nothing is known of them here: {', '.join(without)}.")
    head = ["benchmark", "what", "ours", "ours / the best peer (min–max)", "why", "what would change it"]
    said.append(_table(head, lines) if lines else "In no line of what was measured.")
    if fallen:
        head = ["benchmark", "claim", "found", "target", "why", "what would change it"]
        said += ["What does not hold besides:", _table(head, fallen)]
    return "\n\n".join(said)


def _reason(reasons: Mapping[str, Any], name: str, claim: Claim) -> tuple[str, str]:
    found = reasons.get(name, {}).get(claim.name, {})
    return found.get("why", NO_REASON), found.get("change", NO_REASON)


def _what(claim: Claim) -> str:
    return f"`{claim.name}`: {claim.metric}, {claim.case}"


def _lines(comparisons: Iterable[Comparison]) -> str:
    """`16 MiB: **1.41 (1.3–1.5)** of Ray put`."""
    return "; ".join(
        f"{one.at}{': ' if one.at else ''}**{ranged(one.ratio, one.low, one.high)}** of {one.peer}"
        for one in comparisons
    )


def _measured(result: Result, folder: Path) -> list[str]:
    minutes, seconds = divmod(result.machine["seconds"], 60)
    parts = [f"{summary(result.machine)}; `{result.machine['command']}`, {minutes} min {seconds} s."]
    parts += ["\n".join(f"- {note}" for note in result.notes)]
    if result.claims:
        head = ["claim", "ours / the best peer, or the figure (min–max)", "best peer", "target", "holds"]
        parts.append(_table(head, [_claim_line(claim) for claim in result.claims], ":--- | ---: | :--- | :--- | :---"))
    plots = sorted((folder / "results").glob(f"{result.name}*.png"))
    parts += [f"![{plot.stem}](results/{plot.name})" for plot in plots]
    cases = dict.fromkeys(row.case for row in result.rows)
    return parts + [_case(result, case) for case in cases]


def _claim_line(claim: Claim) -> list[str]:
    holds = {True: "yes", False: "**no**", None: "not measured"}[claim.holds]
    if claim.value is None or claim.low is None or claim.high is None:
        return [f"`{claim.name}`", claim.why, "", claim.target, holds]
    peer = ""
    if claim.comparisons:
        peer = f"{claim.worst.peer}{f' at {claim.worst.at}' if claim.worst.at else ''}{claim.said_without}"
    return [f"`{claim.name}`", ranged(claim.value, claim.low, claim.high), peer, claim.target, holds]


def _case(result: Result, case: str) -> str:
    rows = [row for row in result.rows if row.case == case]
    wide = any(row.at for row in rows)
    tables = [_by_line(result, case, rows, metric) for metric in _metrics(rows)] if wide else [_by_system(rows)]
    return f"### {case}\n\n" + "\n\n".join(tables)


def _metrics(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.metric, row.unit) for row in rows if row.metric))


def _by_line(result: Result, case: str, rows: Sequence[Row], metric: tuple[str, str]) -> str:
    """A line for each `at`, a column for each system; ratios of claims first."""
    chosen = [row for row in rows if (row.metric, row.unit) == metric or row.missing]
    systems = list(dict.fromkeys(row.system for row in chosen))
    claims = [one for one in result.claims if (one.case, one.metric) == (case, metric[0]) and one.comparisons]
    lines = []
    for at in dict.fromkeys(row.at for row in chosen if not row.missing):
        line = [at, *(_lines([replaced]) if (replaced := _at(claim, at)) else "" for claim in claims)]
        for system in systems:
            own = [row for row in chosen if row.system == system]
            line.append(next((str(row) for row in own if row.at == at or (row.missing and not row.at)), ""))
        lines.append(line)
    head = ["", *(f"{claim.ours} / best peer" for claim in claims), *systems]
    return f"{', '.join(part for part in metric if part)}:\n\n{_table(head, lines, right=True)}"


def _at(claim: Claim, at: str) -> Comparison | None:
    found = next((one for one in claim.comparisons if one.at == at), None)
    return Comparison("", found.peer, found.ratio, found.low, found.high, found.runs) if found else None


def _by_system(rows: Sequence[Row]) -> str:
    """A line for each system, a column for each metric."""
    metrics = _metrics(rows)
    lines = []
    for system in dict.fromkeys(row.system for row in rows):
        own = {(row.metric, row.unit): row for row in rows if row.system == system}
        missing = next((row.missing for row in own.values() if row.missing), "")
        lines.append([system, *(str(own[metric]) if metric in own else missing for metric in metrics)])
    head = ["", *(", ".join(part for part in metric if part) for metric in metrics)]
    return _table(head, lines, right=True)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]], align: str = "", *, right: bool = False) -> str:
    align = align or " | ".join(["---", *("---:" if right else "---" for _ in head[1:])])
    return "\n".join([f"| {' | '.join(head)} |", f"| {align} |", *(f"| {' | '.join(line)} |" for line in lines)])


def _not_run(reasons: Mapping[str, Any]) -> str:
    since = reasons.get("not_run", "it was restated")
    return f"*Not run yet since {since}.*"


def _row(content: dict[str, Any]) -> Row:
    fields: dict[str, Any] = {**content, "values": tuple(content["values"])}
    return Row(**fields)


def _claim(content: dict[str, Any]) -> Claim:
    fields: dict[str, Any] = {**content, "without": tuple(content["without"])}
    fields["comparisons"] = tuple(Comparison(**one) for one in content["comparisons"])
    return Claim(**fields)


if __name__ == "__main__":
    sys.exit(main())
