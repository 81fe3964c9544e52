"""A plan as one page of HTML: the batch on its mesh, and what takes the memory of a device."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from braidax.pictures.drawing import Box, Drawing, Shape, Words
from braidax.pictures.page import cut, folded, legend, page, section
from braidax.pictures.treemap import Place, treemap

from .planned.stages import PlannedPipeline
from .planned.variable import PlannedAxis, PlannedVariable
from .strategy import in_words

_WIDTH, _HIGH = 880.0, 440.0
_MOST_ROWS, _MOST_COLUMNS = 24, 16  # of devices that are drawn
_MOST_BOXES, _LEAST_SHARE = 150, 0.0004  # of variables that are drawn apart
_PARTS = (
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("state", "optimizer's state"),
    ("kept", "gathered and kept"),
)
_HELD, _ACTIVATIONS = "parameters", "gradients"  # roles of a pipeline's bars


class Shown(NamedTuple):
    """What is drawn of a plan: fields of it by these names."""

    axes: Sequence[PlannedAxis]
    batch_axes: Sequence[str]
    microbatches: int
    variables: Sequence[PlannedVariable]
    pipeline: PlannedPipeline | None


def plan_page(plan: Shown, text: str) -> str:
    """Returns the page of a plan. **Arguments:** `text`: all that it says, in words."""
    mesh = ", ".join(f"{axis.name}={axis.size} ({axis.strategy or 'no strategy'})" for axis in plan.axes)
    split = f"split over {' × '.join(plan.batch_axes)}" if plan.batch_axes else "whole on every device"
    words = f"{mesh}. The batch is {split}; microbatches: {plan.microbatches}. A cell is a device."
    parts = [section("The batch on its mesh", words, _mesh(plan))]
    if plan.pipeline is None:
        parts.append(section("Memory of a device", *_memory(plan.variables)))
    else:
        parts.append(section("Memory of the devices of each stage", *_stages(plan.pipeline)))
    return page("A plan", [*parts, folded("The plan as text", text)])


def _mesh(plan: Shown) -> Drawing:
    """Draws a cell for each device: rows are all axes but the last one, which is along the columns."""
    *outer, last = plan.axes
    rows = list(itertools.islice(itertools.product(*(range(axis.size) for axis in outer)), _MOST_ROWS))
    num_rows, columns = math.prod(axis.size for axis in outer), min(last.size, _MOST_COLUMNS)
    left, top, high = (150.0 if outer else 8.0), 24.0, 40.0
    wide = min(110.0, (_WIDTH - left - 8) / columns)
    shapes: list[Shape] = [
        Words(left + (at + 0.5) * wide, 14, cut(f"{last.name} {at}", wide, 11), 11, "middle", "faint")
        for at in range(columns)
    ]
    for row, outside in enumerate(rows):
        y = top + row * high
        named = [f"{axis.name} {at}" for axis, at in zip(outer, outside, strict=True)]
        shapes.append(Words(left - 10, y + 24, cut(", ".join(named), left - 14, 11), 11, "end", "faint"))
        for column in range(columns):
            at = {**{axis.name: one for axis, one in zip(outer, outside, strict=True)}, last.name: column}
            shapes += _cell(plan, at, Place(left + column * wide, y, wide - 3, high - 3))
    bottom = top + len(rows) * high
    if num_rows > len(rows) or last.size > columns:
        shown = f"{len(rows) * columns:,} of {num_rows * last.size:,} devices; the others go on like these"
        shapes.append(Words(left, bottom + 14, shown, 11, role="faint"))
        bottom += 20
    return Drawing("The batch on its mesh", _WIDTH, bottom + 4, tuple(shapes))


def _cell(plan: Shown, at: Mapping[str, int], place: Place) -> list[Shape]:
    """Draws a device: which part of the batch it has, and which stages."""
    sizes = {axis.name: axis.size for axis in plan.axes}
    num_parts, part = 1, 0
    for name in plan.batch_axes:
        num_parts, part = num_parts * sizes[name], part * sizes[name] + at[name]
    samples = "all samples" if num_parts == 1 else f"part {part + 1} of {num_parts}"
    stages = "" if plan.pipeline is None else _stages_at(plan.pipeline, at[plan.pipeline.axis])
    where = ", ".join(f"{name} {one}" for name, one in at.items())
    tip = f"{where}: {samples}" + (f"; {stages}" if stages else "")
    strength = 0.35 + 0.65 * (part + 1) / num_parts
    x, y, wide, high = place
    shapes: list[Shape] = [Box(x, y, wide, high, "compute", tip, strength)]
    lines = [cut(line, wide - 4, 11) for line in (samples, stages) if line]
    for number, line in enumerate(lines):
        baseline = y + high / 2 + 4 + 14 * (number - (len(lines) - 1) / 2)
        shapes.append(Words(x + wide / 2, baseline, line, 11, "middle"))
    return shapes


def _stages_at(pipeline: PlannedPipeline, place: int) -> str:
    """Returns which stages are at a place along the axis."""
    device = next(number for number, places in enumerate(pipeline.places) if place in places)
    found = [str(number) for number, stage in enumerate(pipeline.stages) if stage.device == device]
    return f"stage{'s' if len(found) > 1 else ''} {', '.join(found)}"


def _memory(variables: Sequence[PlannedVariable]) -> tuple[str, Drawing]:
    """Draws a rectangle for each variable, as large as what a device holds for it; says what is drawn."""
    is_known = all(one.costs.held_bytes is not None for one in variables)
    held = sorted(((sum(_bytes_of(one, is_known)), one) for one in variables), key=lambda pair: -pair[0])
    held = [(num_bytes, one) for num_bytes, one in held if num_bytes]
    total = sum(num_bytes for num_bytes, _ in held)
    drawn = [pair for pair in held[:_MOST_BOXES] if pair[0] >= _LEAST_SHARE * total]
    small = held[len(drawn) :]
    weights = [float(num_bytes) for num_bytes, _ in drawn]
    rest = sum(num_bytes for num_bytes, _ in small)
    places = treemap([*weights, *([float(rest)] if rest else [])], Place(0.0, 24.0, _WIDTH, _HIGH))
    roles = _PARTS if any(one.costs.kept_bytes for one in variables) else _PARTS[:3]
    shapes: list[Shape] = legend(roles if is_known else roles[:1], 520.0)
    for (_, one), place in zip(drawn, places, strict=False):
        shapes += _variable(one, _bytes_of(one, is_known), place)
    if rest:
        told = f"{len(small)} smaller variables: {in_words(rest)}"
        shapes += [Box(*places[-1], "none", told), *_named(told, places[-1])]
    told = f"{in_words(total)} in {len(variables)} variables; "
    words = told + (
        "activations come on top." if is_known else "on all devices: what one of them holds, a step's plan says."
    )
    return words, Drawing("Memory of a device", _WIDTH, _HIGH + 26, tuple(shapes))


def _bytes_of(one: PlannedVariable, is_known: bool) -> tuple[int, ...]:
    """Returns the bytes of parameter, gradient, optimizer's state and what is kept, in the order of `_PARTS`."""
    costs = one.costs
    if not is_known:
        return (one.num_bytes,)
    return (costs.held_bytes or 0, costs.gradient_bytes or 0, costs.state_bytes or 0, costs.kept_bytes)


def _variable(one: PlannedVariable, parts: Sequence[int], place: Place) -> list[Shape]:
    """Draws the parts of a variable side by side, and its name above."""
    shape = "×".join(map(str, one.shape)) or "scalar"
    placement = ", ".join(dict.fromkeys(map(str, one.placements)))
    told = "; ".join(f"{words} {in_words(size)}" for (_, words), size in zip(_PARTS, parts, strict=False) if size)
    tip = f"{one.path}, {shape} {one.dtype}: {placement}\n{told}\n{one.why}"
    shapes: list[Shape] = []
    at, total = 0.0, sum(parts)
    for (role, _), size in zip(_PARTS, parts, strict=False):
        share = size / total
        x, y, wide, high = place
        if wide >= high:
            shapes.append(Box(x + at * wide, y, share * wide, high, role, tip, 0.85))
        else:
            shapes.append(Box(x, y + at * high, wide, share * high, role, tip, 0.85))
        at += share
    shapes = [shape for shape in shapes if isinstance(shape, Box) and shape.width > 0 and shape.height > 0]
    return [*shapes, *_named(one.path.removeprefix("params/"), place, in_words(total))]


def _named(name: str, place: Place, below: str = "") -> list[Shape]:
    """Writes a name into a rectangle that has room for it."""
    x, y, wide, high = place
    shown = cut(name, wide - 8, 11) if high >= 16 else ""
    shapes: list[Shape] = [Words(x + 4, y + 13, shown, 11, is_bold=True)] if shown else []
    if shown and below and high >= 32 and cut(below, wide - 8, 11) == below:
        shapes.append(Words(x + 4, y + 27, below, 11))
    return shapes


def _stages(pipeline: PlannedPipeline) -> tuple[str, Drawing]:
    """Draws a bar for each device of the schedule; says what is drawn."""
    bars = [
        (
            _stages_at(pipeline, places.start),
            sum(stage.costs.held_bytes for stage in pipeline.stages if stage.device == device),
            pipeline.schedule.peak_bytes[device],
        )
        for device, places in enumerate(pipeline.places)
    ]
    left, row, top = 150.0, 26.0, 26.0
    scale = (_WIDTH - left - 110) / max(1, *(held + peak for _, held, peak in bars))
    roles = ((_HELD, "parameters, gradients, optimizer's state"), (_ACTIVATIONS, "activations, at most"))
    shapes: list[Shape] = legend(roles, 560.0)
    for number, (name, held, peak) in enumerate(bars):
        y = top + number * row
        shapes.append(Words(left - 10, y + 14, cut(name, left - 14, 11), 11, "end"))
        shapes.append(Box(left, y, held * scale, row - 6, _HELD, f"{name}: {in_words(held)} held"))
        shapes.append(
            Box(left + held * scale, y, peak * scale, row - 6, _ACTIVATIONS, f"{name}: {in_words(peak)} of activations")
        )
        shapes.append(Words(left + (held + peak) * scale + 6, y + 14, in_words(held + peak), 11))
    fullest = max(held + peak for _, held, peak in bars)
    words = f"{in_words(fullest)} on the fullest device: by the schedule {pipeline.schedule.name}, and by formula."
    return words, Drawing("Memory of the devices of each stage", _WIDTH, top + len(bars) * row + 4, tuple(shapes))
