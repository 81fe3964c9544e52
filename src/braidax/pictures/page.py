"""What all pages share: the frame around drawings and texts, and numbers in words."""

from collections.abc import Sequence
from html import escape

from braidax.pictures.drawing import Box, Drawing, Shape, Words, styles, to_svg

_STYLE = """
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:920px;
padding:20px 16px 60px}h1{font-size:24px;line-height:1.2;margin:8px 0}h2{font-size:18px;margin:32px 0 4px}
p{margin:6px 0}.faint{color:var(--faint)}.wide{overflow-x:auto}svg{display:block;width:100%;height:auto}
svg text{font-family:inherit;pointer-events:none}rect{stroke:var(--back);stroke-width:.5}rect:hover{stroke:var(--text)}
details{margin-top:28px}summary{cursor:pointer}pre{overflow-x:auto;font:12px/1.4 ui-monospace,monospace}
"""


def page(title: str, parts: Sequence[str]) -> str:
    """Returns a page. **Arguments:** `title`: above all. `parts`: elements, such as `section` and `chart` give."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{styles()}{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def section(title: str, words: str, *drawings: Drawing) -> str:
    """Returns a heading, a line below it, and drawings."""
    charts = "".join(f'<div class="wide">{to_svg(one)}</div>' for one in drawings)
    return f'<h2>{escape(title)}</h2><p class="faint">{escape(words)}</p>{charts}'


def folded(title: str, text: str) -> str:
    """Returns plain text that is shown to who asks for it."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def legend(roles: Sequence[tuple[str, str]], width: float, y: float = 0.0) -> list[Shape]:
    """Returns what colors mean, in a row. **Arguments:** `roles`: of the palette, each with its words."""
    each = width / max(1, len(roles))
    shapes: list[Shape] = []
    for at, (role, words) in enumerate(roles):
        shapes += [Box(at * each, y + 2, 11, 11, role), Words(at * each + 16, y + 12, words, 11, role="faint")]
    return shapes


def cut(text: str, width: float, size: float) -> str:
    """Returns a text, or its end, that fits a width in points, or nothing where hardly any does."""
    most = int(width / (0.56 * size))
    if len(text) <= most:
        return text
    return f"…{text[len(text) - most + 1 :]}" if most >= 4 else ""
