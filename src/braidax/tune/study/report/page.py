"""The report: one page that asks for nothing from elsewhere, for light and dark screens, and for narrow ones."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from braidax.pictures.drawing import Drawing, styles, to_svg
from braidax.tune.attribution import LANES
from braidax.tune.study.case import Case
from braidax.tune.study.design import Design
from braidax.tune.study.findings import Crossed, Findings, Timed
from braidax.tune.study.statistics import Estimate

from .charts import heat_map, interval, milliseconds, stalls, sweep_chart
from .sentences import of_best, of_crossed, of_effect, of_hypothesis, of_predicted, surety
from .timeline import timeline

_STYLE = """
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:880px;
padding:20px 16px 60px}h1{font-size:26px;line-height:1.2;margin:8px 0}h2{font-size:19px;margin:34px 0 6px}
a{color:var(--accent);text-decoration:none}a:hover{text-decoration:underline}p{margin:6px 0}
.faint{color:var(--faint)}.wide{overflow-x:auto}svg{display:block;width:100%;height:auto}svg text{font-family:inherit}
table{border-collapse:collapse;font-size:13px;min-width:100%}th,td{padding:4px 8px;border-bottom:1px solid var(--line);
text-align:right;white-space:nowrap}th:first-child,td:first-child,.words{text-align:left}
.verdict{border:1px solid var(--line);border-left:5px solid var(--faint);border-radius:6px;padding:8px 12px;
margin:8px 0}
.confirmed{border-left-color:var(--more)}.refuted{border-left-color:var(--less)}
details{border-bottom:1px solid var(--line);padding:5px 0}summary{cursor:pointer}
.sweeps{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:10px}
.sweeps svg{min-width:0!important}
details:target{outline:2px solid var(--accent)}
"""
_SCRIPT = """
function show(){const one=document.getElementById(location.hash.slice(1));
if(one&&one.tagName==="DETAILS"){one.open=true;one.scrollIntoView()}}
addEventListener("hashchange",show);show()
"""


def page(
    case: Case,
    design: Design,
    findings: Findings,
    *,
    facts: Mapping[str, str],
    results: Mapping[str, Any],
    folder: Path,
) -> str:
    """Returns the page of a study.

    **Arguments:** `facts`: of case and machine, by name. `results`: what results.json has, which the page carries, too.
    `folder`: with the traces.
    """
    ids = {one.setting.name: f"t{number}" for number, one in enumerate(findings.timed)}
    parts = [
        f"<h1>What overlaps with what: {escape(case.title)}</h1>",
        f'<p class="faint">{escape("; ".join(f"{name}: {value}" for name, value in facts.items()))}</p>',
        _verdicts(findings, design, ids),
        "<h2>Where the time of a step goes</h2>",
        '<p class="faint">Means of all runs; the line is the interval of the median.</p>',
        _chart(stalls(_in_order(findings.timed))),
        "<h2>Effects and interactions</h2>",
        '<p class="faint">On the diagonal what a factor alone changes; elsewhere by how much two together take longer '
        "than the sum of both changes, in milliseconds a step. Colored where the interval does not hold 0. What is "
        "predicted of an interaction is from the runs of nothing and of each factor alone, lane by lane.</p>",
        _chart(heat_map(findings, design.factors)),
        _effects(findings, ids),
        _sweeps(findings, design),
        _settings(findings, ids),
        "<h2>Timelines</h2>",
        '<p class="faint">Three steps behind the warm ones, of the first block. Traces open in ui.perfetto.dev.</p>',
        *(_timeline(one, ids, design, folder) for one in findings.timed),
        _method(design),
    ]
    carried = json.dumps(results).replace("<", "\\u003c")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>braidax study: {escape(case.title)}</title><style>{styles()}{_STYLE}</style></head><body>"
        f'{"".join(parts)}<script type="application/json" id="results">{carried}</script>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _in_order(timed: Sequence[Timed]) -> list[Timed]:
    return sorted(timed, key=lambda one: one.seconds.value)


def _chart(drawing: Drawing) -> str:
    return f'<div class="wide">{to_svg(drawing)}</div>'


def _verdicts(findings: Findings, design: Design, ids: Mapping[str, str]) -> str:
    cards = "".join(
        f'<div class="verdict {one.verdict}"><b>{escape(one.pair)}</b>: {escape(of_hypothesis(one))} '
        f"{_sources(one.names, ids, findings)}</div>"
        for one in findings.hypotheses
    )
    told = [of_best(findings, design), *map(of_effect, findings.effects), *of_crossed(findings)]
    told += of_predicted(findings)
    lines = "".join(f"<li>{escape(one)}</li>" for one in told)
    return f"<h2>Is all on worse than the best single one?</h2>{cards}<h2>Findings</h2><ul>{lines}</ul>"


def _sources(names: Sequence[str], ids: Mapping[str, str], findings: Findings) -> str:
    labels = {one.setting.name: one.label for one in findings.timed}
    links = ", ".join(f'<a href="#{ids[name]}">{escape(labels[name])}</a>' for name in names)
    return f'<span class="faint">from {links}</span>'


def _number(one: Estimate | None, name: str, ids: Mapping[str, str]) -> str:
    if one is None:
        return "<td></td><td></td>"
    return f'<td><a href="#{ids[name]}">{milliseconds(one.value)}</a></td><td>{interval(one)}</td>'


def _effects(findings: Findings, ids: Mapping[str, str]) -> str:
    rows = ["<th>what</th><th>ms a step</th><th>interval</th><th>at</th><th>average</th><th>interval</th>"]
    rows[0] += '<th>predicted</th><th class="words">its sign</th><th class="words">verdict</th>'
    rows[0] += '<th class="words">from</th>'
    found = [(one.factor, one) for one in findings.effects]
    found += [(" × ".join(one.factors), one) for one in findings.crossed]
    for what, one in found:
        alone, average = (_number(each, one.names[0], ids) for each in (one.alone, one.on_average))
        words = (
            f'<td class="words">{escape(one.verdict)}</td><td class="words">{_sources(one.names, ids, findings)}</td>'
        )
        told = _predicted(one) if isinstance(one, Crossed) else "<td></td><td></td>"
        rows.append(f"<td>{escape(what)}</td>{alone}<td>{surety(one.alone)}</td>{average}{told}{words}")
    return _table(rows)


def _predicted(one: Crossed) -> str:
    told = {lane: milliseconds(seconds) for lane, seconds in one.predicted.lanes.items()}
    lanes = "; ".join(f"{lane} {value} ms" for lane, value in told.items() if value != "0")
    number = f'<td title="{escape(lanes)}">{milliseconds(one.predicted.seconds)}</td>'
    return f'{number}<td class="words">{escape(one.held)}</td>'


def _table(rows: Sequence[str]) -> str:
    return f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


def _sweeps(findings: Findings, design: Design) -> str:
    if not design.sweeps:
        return ""
    charts = "".join(f"<div>{to_svg(sweep_chart(each, findings, design))}</div>" for each in design.sweeps)
    return f'<h2>How coarse</h2><div class="sweeps">{charts}</div>'


def _settings(findings: Findings, ids: Mapping[str, str]) -> str:
    heads = "".join(f"<th>{lane}</th>" for lane in LANES)
    rows = [f"<th>setting</th><th>ms a step</th><th>interval</th><th>at</th>{heads}"]
    for one in _in_order(findings.timed):
        to = f'<a href="#{ids[one.setting.name]}">'
        lanes = "".join(f"<td>{to}{milliseconds(one.lanes[lane])}</a></td>" for lane in LANES)
        number = _number(one.seconds, one.setting.name, ids)
        rows.append(f"<td>{to}{escape(one.label)}</a></td>{number}<td>{surety(one.seconds)}</td>{lanes}")
    return f"<h2>All settings</h2>{_table(rows)}"


def _timeline(one: Timed, ids: Mapping[str, str], design: Design, folder: Path) -> str:
    name = one.setting.name
    place = f"traces/{name}.json.gz"
    drawing = timeline(folder / place, design.length(one.setting).num_warm)
    head = f"{escape(one.label)}: {milliseconds(one.seconds.value)} ms a step"
    link = f'<p><a href="{quote(place)}">the trace</a> <span class="faint">{escape(name)}</span></p>'
    return f'<details id="{ids[name]}"><summary>{head}</summary>{link}{_chart(drawing)}</details>'


def _method(design: Design) -> str:
    return (
        "<h2>How it was measured</h2><p>Each run trains as <code>fit</code> does; programs are compiled before, "
        f"and stay. A block has each of {len(design.settings)} settings once, in random order (seed {design.seed}), "
        f"and every second block goes back the way of the one before. {design.num_blocks} blocks, at least "
        f"{design.num_steps} steps a run, whole intervals between checkpoints. The time of a run is the mean over its "
        "steps. Numbers are medians over blocks of differences within blocks; intervals are between ranks of their "
        "pairwise means (Wilcoxon), exact for symmetric noise, and say how often they hold the true value. Many "
        "comparisons are made: of twenty intervals at 95 % one misses by accident. What is sent inside of compiled "
        "programs counts as compute. Bubble and persist interference are "
        "estimates of the attribution; a pipeline on devices that share cores computes less at once than one that has "
        "devices of its own.</p>"
    )
