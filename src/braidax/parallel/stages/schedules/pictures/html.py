"""A simulated schedule as one page of HTML that needs nothing else: what devices do, and what lives meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from string import Template

from braidax.parallel.stages.schedules.dependencies import Dependencies, crossings
from braidax.parallel.stages.schedules.operations import Kind
from braidax.parallel.stages.schedules.simulate import Simulation, Timed

_LEFT, _WIDTH, _LANE, _CURVE, _GAP = 90, 1100, 30, 34, 18  # pixels
_EACH = _LANE + _CURVE + _GAP  # of a device
_HEADING, _AXIS, _TICKS = 22, 44, 5
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward of inputs",
    Kind.WEIGHT: "gradient of weights",
    Kind.UPDATE: "update",
    Kind.SEND_F: "send of activations",
    Kind.SEND_B: "send of gradients",
    Kind.RECV_F: "receive of activations",
    Kind.RECV_B: "receive of gradients",
}
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>$title</title><style>
:root { color-scheme: light dark; --back: #ffffff; --text: #1f2328; --line: #8c959f; --F: #9ecbff; --B: #ffc46b;
  --I: #ffc46b;  --W: #a5e0a0; --U: #d8b9ff; --T: #c8ccd1; --curve: #cf222e; --on: #1f2328; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --line: #6e7681; --F: #1f6feb;
  --B: #9e6a03;  --I: #9e6a03; --W: #238636; --U: #8957e5; --T: #484f58; --curve: #ff7b72; --on: #ffffff; } }
body { background: var(--back); color: var(--text); font: 14px system-ui, sans-serif; margin: 24px; }
.wide { overflow-x: auto; } svg { min-width: 760px; max-width: 100%; height: auto; }
text { font: 11px system-ui, sans-serif; fill: var(--text); }
rect { stroke: var(--back); stroke-width: 0.6; } rect:hover { stroke: var(--text); stroke-width: 1.5; }
rect + text { fill: var(--on); pointer-events: none; text-anchor: middle; } .later { opacity: 0.72; }
.F { fill: var(--F); } .B { fill: var(--B); } .I { fill: var(--I); } .W { fill: var(--W); } .U { fill: var(--U); }
.T { fill: var(--T); } path { fill: var(--curve); fill-opacity: 0.18; stroke: var(--curve); }
line { stroke: var(--line); } .panel { font-weight: 600; font-size: 13px; } .tick { text-anchor: middle; }
</style></head><body><h1>$title</h1><p>$summary</p>
<div class="wide"><svg viewBox="0 0 $width $height" width="$width" height="$height" role="img" aria-label="$title">
$lanes
</svg></div></body></html>
""")


def to_html(simulation: Simulation) -> str:
    """Returns the page. Who points at an operation is told its microbatch, seconds and bytes; red is what lives.

    It asks for nothing from elsewhere, runs no script, and is made for light and dark screens.
    """
    schedule = simulation.schedule
    summary = (
        f"{schedule.num_stages} stages on {schedule.num_devices} devices, {schedule.num_microbatches} microbatches: "
        f"{simulation.makespan_seconds:.4g} s"
    )
    lanes = _lanes(simulation, 5, _WIDTH / (simulation.makespan_seconds or 1.0), ())
    return _page(schedule.name, summary, lanes, schedule.num_devices * _EACH + 10)


def stacked_html(
    panels: Mapping[str, Simulation], *, title: str, sent_bytes: Sequence[int] = (), devices: Sequence[str] = ()
) -> str:
    """Returns a page like that of `to_html` with several simulations one below the other, on one scale of time.

    Transfers are drawn where lists have none, too: each from when what it sends is made.

    **Arguments:** `panels`: by what is written above them. `title`: of the page. `sent_bytes`: from each stage to the
    next one, for a microbatch. `devices`: what each is called; by default "device 0" and so on.
    """
    longest = max((one.makespan_seconds for one in panels.values()), default=0.0)
    scale, top, parts = _WIDTH / (longest or 1.0), 5, list[str]()
    for name, simulation in panels.items():
        heading = f"{name}: {simulation.makespan_seconds:.4g} s"
        parts.append(f'<text class="panel" x="4" y="{top + 13}">{escape(heading)}</text>')
        parts += _lanes(with_sends(simulation), top + _HEADING, scale, sent_bytes, devices)
        bottom = top + _HEADING + simulation.schedule.num_devices * _EACH
        parts += _ticks(bottom, longest, scale)
        top = bottom + _AXIS
    return _page(title, "One scale of time for all; point at an operation to see what it takes.", parts, top)


def with_sends(simulation: Simulation) -> Simulation:
    """Returns a simulation in which each transfer is noted where it is sent, if its lists have none."""
    schedule, costs = simulation.schedule, simulation.costs
    if any(one.is_transfer for one in schedule.operations()):
        return simulation
    ends = {each.operation: each.end for timed in simulation.timed for each in timed}
    dependencies, timed = Dependencies(schedule), [list(each) for each in simulation.timed]
    for send in crossings(schedule):
        made = dependencies.of(send)[0]
        if made in ends:
            device = schedule.device_of_stage[send.stage]
            timed[device].append(Timed(send, device, ends[made], ends[made] + costs.seconds(send)))
    return replace(simulation, timed=tuple(map(tuple, timed)))


def _page(title: str, summary: str, parts: Sequence[str], height: float) -> str:
    return _PAGE.substitute(
        title=escape(title),
        summary=escape(summary),
        width=_LEFT + _WIDTH + 40,
        height=height,
        lanes="\n".join(parts),
    )


def _ticks(top: int, seconds: float, scale: float) -> list[str]:
    parts: list[str] = []
    for tick in range(_TICKS + 1):
        at = seconds * tick / _TICKS
        x = _LEFT + at * scale
        parts.append(f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.2f}" y="{top + 16}">{at:.3g} s</text>')
    return parts


def _lanes(
    simulation: Simulation, top: int, scale: float, sent_bytes: Sequence[int], devices: Sequence[str] = ()
) -> list[str]:
    names = devices or [f"device {at}" for at in range(simulation.schedule.num_devices)]
    lanes = (_lane(simulation, at, top + at * _EACH, scale, sent_bytes, name) for at, name in enumerate(names))
    return [part for lane in lanes for part in lane]


def _lane(
    simulation: Simulation, device: int, top: int, scale: float, sent_bytes: Sequence[int], name: str
) -> list[str]:
    stages = [stage for stage, home in enumerate(simulation.schedule.device_of_stage) if home == device]
    parts = [
        f'<text x="4" y="{top + 14}">{escape(name)}</text>',
        f'<text x="4" y="{top + 28}">idle {simulation.bubble(device):.1%}</text>',
    ]
    transfers = [each for each in simulation.timed[device] if each.operation.is_transfer]
    for each in [*transfers, *(each for each in simulation.timed[device] if not each.operation.is_transfer)]:
        if each.end > each.start:
            later = stages.index(each.operation.stage) > 0
            parts += _box(each, _told(simulation, each, sent_bytes), top, scale, later)
    return [*parts, *_curve(simulation, device, top + _LANE + 4, scale)]


def _told(simulation: Simulation, timed: Timed, sent_bytes: Sequence[int]) -> str:
    operation, kind = timed.operation, timed.operation.kind
    what = (
        f"update {operation.microbatch}"
        if kind is Kind.UPDATE
        else f"{_NAMES[kind]} of microbatch {operation.microbatch}"
    )
    seconds = f"{timed.end - timed.start:.4g} s, from {timed.start:.4g} s to {timed.end:.4g} s"
    change = simulation.costs.change(operation)[1]
    told = f"{what}, stage {operation.stage}: {seconds}"
    if operation.is_transfer and sent_bytes:
        border = min(operation.stage, operation.partner.stage)
        return f"{told}; {sent_bytes[border]:,} bytes"
    return told + (f"; {change:+,} bytes of activations" if change else "")


def _box(timed: Timed, told: str, top: int, scale: float, is_later: bool) -> list[str]:
    operation = timed.operation
    x, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    style = "T" if operation.is_transfer else f"{operation.kind}{' later' if is_later else ''}"
    y, height = (top + _LANE, 3) if operation.is_transfer else (top, _LANE)
    place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"'
    box = f'<rect class="{style}" {place}><title>{escape(told)}</title></rect>'
    if operation.is_transfer or width < 9:
        return [box]
    return [box, f'<text x="{x + width / 2:.2f}" y="{top + 19}">{operation.microbatch}</text>']


def _curve(simulation: Simulation, device: int, top: int, scale: float) -> list[str]:
    curve, peak = simulation.curve(device), simulation.peak_bytes(device)
    bottom, end = top + _CURVE - 4, _LEFT + simulation.makespan_seconds * scale
    path, before = [f"M{_LEFT} {bottom}"], float(bottom)
    for live in curve:
        y = bottom - (_CURVE - 8) * live.bytes / max(peak, 1)
        x = _LEFT + live.seconds * scale
        path.append(f"L{x:.2f} {before:.2f} L{x:.2f} {y:.2f}")
        before = y
    told = f"device {device}: at most {peak:,} bytes in {simulation.peak_live(device)} activations"
    return [
        f'<path d="{" ".join(path)} L{end:.2f} {before:.2f} L{end:.2f} {bottom}"><title>{escape(told)}</title></path>',
        f'<line x1="{_LEFT}" y1="{bottom}" x2="{_LEFT + _WIDTH}" y2="{bottom}"/>',
        f'<text x="4" y="{bottom - 6}">{peak:,} bytes</text>',
    ]
