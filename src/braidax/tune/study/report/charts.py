"""The pictures of a study: where time goes, what is in whose way, how coarse to be, and what ran when."""

import math
from collections.abc import Sequence

from braidax.pictures.drawing import Box, Drawing, Shape, Stroke, Words, role_of
from braidax.tune.attribution import LANES
from braidax.tune.study.design import Design
from braidax.tune.study.factors import Factor, Sweep
from braidax.tune.study.findings import Findings, Timed, label
from braidax.tune.study.statistics import Estimate

_ROW, _BAR = 21.0, 14.0


def milliseconds(seconds: float) -> str:
    """Returns seconds in milliseconds, with three digits that count."""
    value = 1000 * seconds
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}"


def interval(one: Estimate) -> str:
    """Returns an interval in milliseconds, such as `12.1 to 13.0`."""
    return f"{milliseconds(one.low)} to {milliseconds(one.high)}"


def stalls(timed: Sequence[Timed], *, width: float = 760.0) -> Drawing:
    """Draws a bar for each setting, in the order given, its lanes side by side, and the interval of its median."""
    left, right = 272.0, 74.0
    longest = max(max(one.seconds.high, sum(one.lanes.values())) for one in timed)
    scale = (width - left - right) / (longest or 1.0)
    shapes, top = _legend(width), 44.0
    for row, one in enumerate(timed):
        y = top + row * _ROW
        shapes.append(Words(left - 8, y + _BAR - 3, one.label, 11, "end"))
        x = left
        for lane in LANES:
            seconds = one.lanes[lane]
            if seconds > 0:
                tip = f"{one.label}: {lane} {milliseconds(seconds)} ms"
                shapes.append(Box(x, y, seconds * scale, _BAR, role_of(lane), tip))
                x += seconds * scale
        middle = y + _BAR / 2
        low, high = (left + scale * at for at in (one.seconds.low, one.seconds.high))
        shapes += [Stroke(low, middle, high, middle, "text", 1.4)]
        shapes += [Stroke(at, middle - 4, at, middle + 4, "text", 1.4) for at in (low, high)]
        shapes.append(Words(max(x, high) + 6, y + _BAR - 3, f"{milliseconds(one.seconds.value)} ms", 11))
    return Drawing("Where the time of a step goes", width, top + len(timed) * _ROW + 4, tuple(shapes))


def _legend(width: float) -> list[Shape]:
    shapes: list[Shape] = []
    each = width / 4
    for at, lane in enumerate(LANES):
        x, y = (at % 4) * each, (at // 4) * 18.0
        shapes += [Box(x, y + 2, 11, 11, role_of(lane)), Words(x + 16, y + 12, lane, 11, role="faint")]
    return shapes


def heat_map(findings: Findings, factors: Sequence[Factor], *, cell: float = 112.0) -> Drawing:
    """Draws each factor's effect on the diagonal and each pair's interaction beside it, in milliseconds a step."""
    left, top, high = 86.0, 26.0, 64.0
    letters = min(1.0, cell / 100)
    found = {(one.factors[0], one.factors[1]): one for one in findings.crossed}
    effects = {one.factor: one for one in findings.effects}
    largest = max([abs(one.alone.value) for one in [*findings.crossed, *findings.effects]], default=0.0) or 1.0
    shapes: list[Shape] = []
    for column, factor in enumerate(factors):
        shapes.append(Words(left + (column + 0.5) * cell, top - 8, factor, 12 * letters, "middle"))
        shapes.append(Words(left - 8, top + (column + 0.5) * high + 4, factor, 12, "end"))
    for row, one in enumerate(factors):
        for column, other in enumerate(factors):
            what = effects[one] if row == column else found.get((one, other)) or found.get((other, one))
            x, y = left + column * cell, top + row * high
            if what is None:
                shapes.append(Box(x + 1, y + 1, cell - 2, high - 2, "none"))
                continue
            value = what.alone
            role = {"less": "less", "more": "more", "undecided": "none"}[value.sign]
            strength = 1.0 if role == "none" else 0.2 + 0.5 * min(1.0, abs(value.value) / largest)
            kind = f"effect of {one}" if row == column else f"interaction of {one} and {other}"
            tip = (
                f"{kind}: {_signed(value.value)} ms, {interval(value)} at {100 * value.coverage:.0f} %: {what.verdict}"
            )
            shapes.append(Box(x + 1, y + 1, cell - 2, high - 2, role, tip, strength))
            shapes.append(
                Words(x + cell / 2, y + 26, f"{_signed(value.value)} ms", 14 * letters, "middle", is_bold=row == column)
            )
            shapes.append(Words(x + cell / 2, y + 44, what.verdict, 10.5 * letters, "middle"))
    size = left + len(factors) * cell, top + len(factors) * high
    return Drawing("Effects and interactions", *size, tuple(shapes))


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else ''}{milliseconds(seconds)}"


def sweep_chart(each: Sweep, findings: Findings, design: Design, *, width: float = 360.0) -> Drawing:
    """Draws the time of a step by how coarse a factor is, off first, each with its interval."""
    height, left, bottom, top = 200.0, 50.0, 158.0, 26.0
    points = [findings.of(setting) for setting in each.settings]
    names = ["off", *map(str, each.values)]
    highest = max(one.seconds.high for one in points) * 1.08 or 1.0
    beside = f" beside {' + '.join(each.beside)}" if each.beside else ", others off"
    shapes: list[Shape] = [Words(0, 14, f"{each.factor}{beside}", 12, is_bold=True)]
    for tick in range(4):
        y = bottom - (bottom - top) * tick / 3
        shapes.append(Stroke(left, y, width - 8, y, "line", 0.8))
        shapes.append(Words(left - 6, y + 4, milliseconds(highest * tick / 3), 10, "end", "faint"))
    step, before = (width - left - 30) / max(1, len(points)), (0.0, 0.0)
    for at, (one, name) in enumerate(zip(points, names, strict=True)):
        x = left + step * (at + 0.5)
        y, low, high = (
            bottom - (bottom - top) * t / highest for t in (one.seconds.value, one.seconds.low, one.seconds.high)
        )
        if at > 1:
            shapes.append(Stroke(*before, x, y, "accent", 1.6))
        shapes += [Stroke(x, low, x, high, "text", 1.4)]
        tip = f"{label(one.setting, design)}: {milliseconds(one.seconds.value)} ms, {interval(one.seconds)}"
        shapes += [Box(x - 3.5, y - 3.5, 7, 7, "accent", tip), Words(x, bottom + 16, name, 10, "middle", "faint")]
        before = (x, y)
    unit = {"prefetch": "batches ahead", "checkpoint": "steps between checkpoints", "pipeline": "microbatches"}
    shapes.append(
        Words((left + width) / 2, bottom + 34, f"{unit.get(each.factor, '')}; ms a step", 10, "middle", "faint")
    )
    return Drawing(f"Sweep of {each.factor}{beside}", width, height, tuple(shapes))
