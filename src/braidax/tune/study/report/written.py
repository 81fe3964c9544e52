"""Writes what a study has found: a page, a poster, and tables."""

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braidax.tune.attribution import LANES
from braidax.tune.study.case import Case
from braidax.tune.study.design import Design
from braidax.tune.study.findings import Findings, find
from braidax.tune.study.folder import FORMAT, StudyFolder

from .page import page
from .pdf import to_pdf
from .poster import poster


@dataclass(frozen=True)
class Written:
    """What was written. **Fields:** files; `findings`: what is in them."""

    page: Path
    poster: Path
    results: Path
    tables: tuple[Path, ...]
    findings: Findings


def write_report(folder: StudyFolder, case: Case, design: Design) -> Written:
    """Writes report.html, poster.pdf, results.json, runs.csv and effects.csv, from the runs and traces of a folder.

    **Raises:** `ArgumentError` where no block is complete, and for files that the study has not written.
    """
    findings = find(design, folder.runs)
    facts = {**case.facts, **{str(name): str(value) for name, value in folder.about["machine"].items()}}
    results: dict[str, Any] = {"format": FORMAT, "about": folder.about, "facts": facts, **findings.to_dict()}
    results_path = folder.write("results.json", (json.dumps(results, indent=1) + "\n").encode())
    tables = (
        folder.write("runs.csv", _runs(folder).encode()),
        folder.write("effects.csv", _effects(findings).encode()),
    )
    html = page(case, design, findings, facts=facts, results=results, folder=folder.path)
    page_path = folder.write("report.html", html.encode())
    poster_path = folder.write("poster.pdf", to_pdf(poster(case, design, findings, facts)))
    return Written(page_path, poster_path, results_path, tables, findings)


def _runs(folder: StudyFolder) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    names = ["prefetch", "checkpoint_every", "sync", "microbatches"]
    rows.writerow(
        ["setting", "block", *names, "step_seconds", *(f"{lane.replace(' ', '_')}_seconds" for lane in LANES)]
    )
    for run in folder.runs:
        fields = run.setting.to_dict()
        lanes = [run.lanes[lane] for lane in LANES]
        rows.writerow([run.setting.name, run.block, *(fields[name] for name in names), run.step_seconds, *lanes])
    return text.getvalue()


def _effects(findings: Findings) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["what", "of", "seconds", "low", "high", "coverage", "num_blocks", "verdict"])
    for effect in findings.effects:
        found = {"alone": effect.alone, "with others": effect.with_others, "on average": effect.on_average}
        for how, one in found.items():
            if one is not None:
                row = [f"effect, {how}", effect.factor, one.value, one.low, one.high, one.coverage, one.num_blocks]
                rows.writerow([*row, effect.verdict if how == "alone" else ""])
    for crossed in findings.crossed:
        for how, one in {"alone": crossed.alone, "on average": crossed.on_average}.items():
            if one is not None:
                row = [f"interaction, {how}", " x ".join(crossed.factors), one.value, one.low, one.high]
                rows.writerow([*row, one.coverage, one.num_blocks, crossed.verdict if how == "alone" else ""])
        row = ["interaction, predicted", " x ".join(crossed.factors), crossed.predicted.seconds, "", "", "", ""]
        rows.writerow([*row, crossed.held])
    for each in findings.hypotheses:
        one = each.difference
        row = ["all on less the best single one", each.pair, one.value, one.low, one.high, one.coverage, one.num_blocks]
        rows.writerow([*row, each.verdict])
    return text.getvalue()
