"""Shapes on a plane, drawn as SVG here, and of a study as PDF too, so that page and poster show the same."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Box:
    """A rectangle. **Fields:** in points, down from the top. `role`: of the palette. `tip`: shown to who points at it.
    `opacity`: 0 to 1."""

    x: float
    y: float
    width: float
    height: float
    role: str
    tip: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class Stroke:
    """A straight line."""

    x: float
    y: float
    to_x: float
    to_y: float
    role: str = "line"
    width: float = 1.0


@dataclass(frozen=True)
class Words:
    """A line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: Anchor = "start"
    role: str = "text"
    is_bold: bool = False


Shape = Box | Stroke | Words


@dataclass(frozen=True)
class Drawing:
    """Shapes on a plane of a size, in points."""

    title: str
    width: float
    height: float
    shapes: tuple[Shape, ...]


LIGHT = {
    "back": "#ffffff",
    "text": "#1f2328",
    "faint": "#59636e",
    "line": "#d1d9e0",
    "accent": "#0969da",
    "compute": "#3b8ea5",
    "dispatch": "#8fb9d9",
    "data_wait": "#f2a33a",
    "snapshot_stall": "#9d7cd8",
    "persist_interference": "#c9a7eb",
    "exposed_communication": "#d9534f",
    "bubble": "#f0cf65",
    "other": "#b6bec8",
    "more": "#d1495b",
    "less": "#2f8f6b",
    "none": "#eef1f4",
    "parameters": "#3b8ea5",
    "gradients": "#f2a33a",
    "state": "#9d7cd8",
    "kept": "#8fb9d9",
}
DARK = LIGHT | {
    "back": "#0d1117",
    "text": "#e6edf3",
    "faint": "#9198a1",
    "line": "#3d444d",
    "accent": "#58a6ff",
    "compute": "#2f7d94",
    "dispatch": "#5f8fb5",
    "data_wait": "#c9822a",
    "bubble": "#b79a3a",
    "other": "#6b7480",
    "more": "#e0586b",
    "less": "#3fb68b",
    "none": "#1c232b",
    "parameters": "#2f7d94",
    "gradients": "#c9822a",
    "state": "#7a5cb0",
    "kept": "#5f8fb5",
}
"""Colors by role, for light and dark screens; paper is light."""


def role_of(name: str) -> str:
    """Returns the role that a lane has."""
    return name.replace(" ", "_")


def moved(shapes: Iterable[Shape], x: float, y: float) -> list[Shape]:
    """Returns shapes elsewhere."""
    found: list[Shape] = []
    for shape in shapes:
        if isinstance(shape, Stroke):
            ends = {"to_x": shape.to_x + x, "to_y": shape.to_y + y}
            found.append(replace(shape, x=shape.x + x, y=shape.y + y, **ends))
        else:
            found.append(replace(shape, x=shape.x + x, y=shape.y + y))
    return found


def to_svg(drawing: Drawing) -> str:
    """Returns a drawing as an element of a page, whose style has a class for each role."""
    parts = [
        f'<svg viewBox="0 0 {drawing.width:.0f} {drawing.height:.0f}" role="img" '
        f'aria-label="{escape(drawing.title, quote=True)}" style="min-width:{min(drawing.width, 620):.0f}px">'
    ]
    parts += [_svg(shape) for shape in drawing.shapes]
    return "".join([*parts, "</svg>"])


def _svg(shape: Shape) -> str:
    match shape:
        case Box():
            opacity = "" if shape.opacity == 1 else f' fill-opacity="{shape.opacity:.2f}"'
            place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
            inside = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
            return f'<rect {place} class="f-{shape.role}"{opacity}>{inside}</rect>'
        case Stroke():
            ends = f'x1="{shape.x:.2f}" y1="{shape.y:.2f}" x2="{shape.to_x:.2f}" y2="{shape.to_y:.2f}"'
            return f'<line {ends} class="s-{shape.role}" stroke-width="{shape.width:g}"/>'
        case Words():
            bold = ' font-weight="600"' if shape.is_bold else ""
            place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" text-anchor="{shape.anchor}" font-size="{shape.size:g}"'
            return f'<text {place} class="f-{shape.role}"{bold}>{escape(shape.text)}</text>'


def styles() -> str:
    """Returns the style sheet of all roles, for light screens and dark ones."""
    names = {role: f"--{role.replace('_', '-')}" for role in LIGHT}
    light = "".join(f"{names[role]}:{color};" for role, color in LIGHT.items())
    dark = "".join(f"{names[role]}:{color};" for role, color in DARK.items())
    classes = "".join(f".f-{role}{{fill:var({name})}}.s-{role}{{stroke:var({name})}}" for role, name in names.items())
    return f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{classes}"
