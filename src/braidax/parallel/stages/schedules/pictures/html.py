"""A simulated schedule as one page of HTML that needs nothing else: what devices do, and what lives meanwhile."""

from html import escape
from string import Template

from braidax.parallel.stages.schedules.operations import Kind
from braidax.parallel.stages.schedules.simulate import Simulation, Timed

_LEFT, _WIDTH, _LANE, _CURVE, _GAP = 90, 1100, 30, 34, 18  # pixels
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
<html lang="en"><head><meta charset="utf-8"><title>$title</title><style>
:root { color-scheme: light dark; --back: #ffffff; --text: #1f2328; --line: #8c959f; --F: #9ecbff; --B: #ffc46b;
  --I: #ffc46b;  --W: #a5e0a0; --U: #d8b9ff; --T: #c8ccd1; --curve: #cf222e; --on: #1f2328; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --line: #6e7681; --F: #1f6feb;
  --B: #9e6a03;  --I: #9e6a03; --W: #238636; --U: #8957e5; --T: #484f58; --curve: #ff7b72; --on: #ffffff; } }
body { background: var(--back); color: var(--text); font: 14px system-ui, sans-serif; margin: 24px; }
svg { max-width: 100%; height: auto; } text { font: 11px system-ui, sans-serif; fill: var(--text); }
rect { stroke: var(--back); stroke-width: 0.6; } rect:hover { stroke: var(--text); stroke-width: 1.5; }
rect + text { fill: var(--on); pointer-events: none; text-anchor: middle; } .later { opacity: 0.72; }
.F { fill: var(--F); } .B { fill: var(--B); } .I { fill: var(--I); } .W { fill: var(--W); } .U { fill: var(--U); }
.T { fill: var(--T); } path { fill: var(--curve); fill-opacity: 0.18; stroke: var(--curve); }
line { stroke: var(--line); }
</style></head><body><h1>$title</h1><p>$summary</p>
<svg viewBox="0 0 $width $height" width="$width" height="$height" role="img" aria-label="$title">
$lanes
</svg></body></html>
""")


def to_html(simulation: Simulation) -> str:
    """Returns the page. Who points at an operation is told its microbatch, seconds and bytes; red is what lives.

    It asks for nothing from elsewhere, runs no script, and is made for light and dark screens.
    """
    schedule = simulation.schedule
    lanes = [lane for device in range(schedule.num_devices) for lane in _lane(simulation, device)]
    summary = (
        f"{schedule.num_stages} stages on {schedule.num_devices} devices, {schedule.num_microbatches} microbatches: "
        f"{simulation.makespan_seconds:.4g} s"
    )
    return _PAGE.substitute(
        title=escape(schedule.name),
        summary=escape(summary),
        width=_LEFT + _WIDTH + 20,
        height=schedule.num_devices * (_LANE + _CURVE + _GAP) + 10,
        lanes="\n".join(lanes),
    )


def _lane(simulation: Simulation, device: int) -> list[str]:
    top = device * (_LANE + _CURVE + _GAP) + 5
    scale = _WIDTH / (simulation.makespan_seconds or 1.0)
    stages = [stage for stage, home in enumerate(simulation.schedule.device_of_stage) if home == device]
    parts = [
        f'<text x="4" y="{top + 14}">device {device}</text>',
        f'<text x="4" y="{top + 28}">idle {simulation.bubble(device):.1%}</text>',
    ]
    transfers = [each for each in simulation.timed[device] if each.operation.is_transfer]
    for each in [*transfers, *(each for each in simulation.timed[device] if not each.operation.is_transfer)]:
        if each.end > each.start:
            parts += _box(simulation, each, top, scale, stages.index(each.operation.stage) > 0)
    return [*parts, *_curve(simulation, device, top + _LANE + 4, scale)]


def _box(simulation: Simulation, timed: Timed, top: int, scale: float, is_later: bool) -> list[str]:
    operation, kind = timed.operation, timed.operation.kind
    x, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    what = (
        f"update {operation.microbatch}"
        if kind is Kind.UPDATE
        else f"{_NAMES[kind]} of microbatch {operation.microbatch}"
    )
    change = simulation.costs.change(operation)[1]
    seconds = f"{timed.end - timed.start:.4g} s, from {timed.start:.4g} s to {timed.end:.4g} s"
    told = f"{what}, stage {operation.stage}: {seconds}"
    told += f"; {change:+,} bytes of activations" if change else ""
    style = "T" if operation.is_transfer else f"{kind}{' later' if is_later else ''}"
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
