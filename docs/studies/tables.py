"""Writes the tables of docs/studies.md from what the studies beside this file have found.

`python docs/studies/tables.py` replaces them where they are.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from braidax.tune.study import FACTORS

HERE = Path(__file__).parent
PAGE = HERE.with_suffix(".md")
CASES = ("digits", "cifar-resnet18", "imdb-bert", "imagenet-resnet18")
LANES = ("data wait", "dispatch", "snapshot stall", "persist interference", "bubble", "compute")
_NOTHING, _ALL_ON = "nothing", " + ".join(FACTORS)
_SPOT = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)

Found = dict[str, Any]


def written(page: str) -> str:
    """Returns the page with its tables as the studies' results have them."""
    found = {case: json.loads((HERE / case / "results.json").read_text()) for case in CASES}
    return _SPOT.sub(lambda spot: f"{spot[1]}{spot[2]}\n{TABLES[spot[1]](found)}\n\n", page)


def _cases(found: dict[str, Found]) -> str:
    rows = [["case", "model", "batch", "samples", "blocks × steps", "nothing", "all on"]]
    for case, one in found.items():
        facts, about = one["facts"], one["about"]["design"]
        blocks = one["settings"][0]["seconds"]["num_blocks"]
        taken = [f"{1e3 * _setting(one, label)['seconds']['value']:.3g} ms" for label in (_NOTHING, _ALL_ON)]
        told = [facts["model"], facts["batch"], facts["data"], f"{blocks} × {about['steps']}"]
        rows.append([f"[{case}](studies/{case}/report.html)", *told, *taken])
    return _table(rows)


def _hypotheses(found: dict[str, Found]) -> str:
    pairs = [one["pair"] for one in found[CASES[0]]["hypotheses"]]
    rows = [["all on against the best single one", *found]]
    for pair in pairs:
        row = [f"`{pair}`"]
        for one in found.values():
            of = next(each for each in one["hypotheses"] if each["pair"] == pair)
            row.append(f"{of['percent']:+.0f} % ({_interval(of['difference'])} ms), {of['verdict']}")
        rows.append(row)
    return _table(rows)


def _effects(found: dict[str, Found]) -> str:
    rows = [["alone", *found]]
    for factor in FACTORS:
        row = [factor]
        for one in found.values():
            of = next(each for each in one["effects"] if each["factor"] == factor)
            row.append(f"{_estimate(of['alone'])}, {of['verdict']}")
        rows.append(row)
    return _table(rows)


def _crossed(found: dict[str, Found]) -> str:
    rows = [["interaction, ms a step", *found]]
    for place in range(len(found[CASES[0]]["crossed"])):
        each = [one["crossed"][place] for one in found.values()]
        rows.append([" × ".join(each[0]["factors"]), *map(_pair, each)])
    return _table(rows)


def _lanes(found: dict[str, Found]) -> str:
    rows = [["ms a step", *(f"{case}: {label}" for case in found for label in ("nothing", "all on"))]]
    for lane in LANES:
        row = [lane]
        for one in found.values():
            row += [f"{1e3 * _setting(one, label)['lanes'][lane]:.2f}" for label in (_NOTHING, _ALL_ON)]
        rows.append(row)
    return _table(rows)


def _setting(one: Found, label: str) -> Found:
    """Returns what was measured of a setting."""
    return next(each for each in one["settings"] if each["label"] == label)


def _estimate(one: Found) -> str:
    return f"{1e3 * one['value']:+.2f} ({_interval(one)})"


def _pair(one: Found) -> str:
    """Returns what two factors do to each other, and what was predicted: in bold where the interval does not hold 0."""
    shown = _estimate(one["alone"])
    shown = shown if one["held"] == "undecided" else f"**{shown}**"
    return f"{shown}, predicted {1e3 * one['predicted']['seconds']:+.1f}"


def _interval(one: Found) -> str:
    return f"{1e3 * one['low']:.1f} to {1e3 * one['high']:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]])


TABLES: dict[str, Callable[[dict[str, Found]], str]] = {
    "cases": _cases,
    "hypotheses": _hypotheses,
    "effects": _effects,
    "interactions": _crossed,
    "lanes": _lanes,
}

if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
