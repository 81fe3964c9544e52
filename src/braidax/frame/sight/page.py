"""A profile as one page of HTML that needs nothing else: the plan as a table, a bar for each operation and rank."""

from collections.abc import Sequence
from html import escape
from string import Template

from braidax.frame.sight.measuring import PHASES, Work
from braidax.frame.sight.operation import Operation, size_of, told_of

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title><style>
:root { color-scheme: light dark; --back: #ffffff; --text: #1f2328; --line: #d0d7de; --partition: #ffc46b;
  --serialize: #d8b9ff; --wire: #9ecbff; --wait: #ff9a94; --spill: #c9b99a; --local: #a5e0a0; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --line: #30363d; --partition: #9e6a03;
  --serialize: #8957e5; --wire: #1f6feb; --wait: #b62324; --spill: #7d6640; --local: #238636; } }
body { background: var(--back); color: var(--text); font: 14px system-ui, sans-serif; margin: 24px; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid var(--line); padding: 4px 10px;
  text-align: right; vertical-align: top; } th.plan, td.plan { text-align: left; }
td.plan { font: 12px ui-monospace, monospace; max-width: 640px; overflow-wrap: anywhere; }
td.bars { min-width: 360px; } small { opacity: 0.75; }
.bar { display: flex; height: 11px; margin: 1px 0; } .bar span { height: 100%; } .alone { color: var(--wait); }
.key span { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 14px; }
.partition { background: var(--partition); } .serialize { background: var(--serialize); }
.wire { background: var(--wire); } .wait { background: var(--wait); } .spill { background: var(--spill); }
.local { background: var(--local); }
</style></head><body><h1>$title</h1><p>$summary</p>
<p class="key">Seconds of each rank, a bar for each, on one scale:$key</p>
<table><thead><tr><th>#</th><th class="plan">operation, the last one first</th><th>rows</th><th>skew</th><th>bytes</th>
<th>sent rows</th><th>sent bytes</th><th>spilled</th><th class="plan">seconds by rank</th></tr></thead><tbody>
$rows
</tbody></table></body></html>
""")


def page_of(operations: Sequence[Operation], rests: tuple[Work, ...], *, summary: str) -> str:
    """Returns the page. Who points at a bar is told what that rank did. It runs no script, and asks for nothing.

    **Arguments:** as the fields of a profile. `summary`: a line above all.
    """
    every = [rests, *(one.works for one in operations)]
    longest = max(sum(work.seconds.values()) for works in every for work in works)
    rows = [_row(number, one, longest) for number, one in enumerate(operations)]
    rest = f'<td class="plan">reading the plan, comparing hashes</td>{"<td></td>" * 6}{_bars(rests, longest)}'
    return _PAGE.substitute(
        title="A plan on ranks",
        summary=escape(summary),
        key="".join(f'<span class="{phase}"></span>{phase}' for phase in PHASES),
        rows="\n".join([*rows, f"<tr><td></td>{rest}</tr>"]),
    )


def _row(number: int, operation: Operation, longest: float) -> str:
    plan, _, way = operation.text.partition("   ← ")
    words = f'<div style="margin-left: {1.2 * operation.depth:.1f}em">{escape(plan)}'
    if way:
        words += f"<br><small>← {escape(way)}</small>"
    if operation.within is not None:
        words += f"<br><small>computed with {operation.within}</small>"
    words += "".join(f'<br><small class="alone">one rank: {escape(what)}</small>' for what in operation.on_one_rank)
    cells = [
        "" if operation.num_rows is None else f"{operation.num_rows:,}",
        "" if operation.skew is None else f"{operation.skew:.2f}",
        "" if operation.num_bytes is None else size_of(operation.num_bytes),
    ]
    if any(work.num_exchanges for work in operation.works):
        cells.append(f"{sum(work.sent_rows for work in operation.works):,}")
        cells.append(size_of(sum(work.sent_bytes for work in operation.works)))
    cells += [""] * (5 - len(cells))
    spilled = sum(work.spilled_bytes for work in operation.works)
    cells.append(size_of(spilled) if spilled else "")
    numbers = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><td>{number}</td><td class="plan">{words}</div></td>{numbers}{_bars(operation.works, longest)}</tr>'


def _bars(works: tuple[Work, ...], longest: float) -> str:
    bars: list[str] = []
    for rank, work in enumerate(works):
        parts = "".join(
            f'<span class="{phase}" style="width: {100 * work.seconds[phase] / longest:.2f}%"></span>'
            for phase in PHASES
            if work.seconds.get(phase, 0.0) > 0.001 * longest
        )
        bars.append(f'<div class="bar" title="{escape(f"rank {rank}: {told_of(work)}")}">{parts}</div>')
    return f'<td class="bars">{"".join(bars)}</td>'
