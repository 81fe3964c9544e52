"""Tables and paragraphs that fit a page of 120 columns."""

import textwrap
from collections.abc import Sequence

WIDTH = 120
_LEAST = 16


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), narrow: Sequence[int] = ()) -> list[str]:
    """Lays out rows, the first of which is the head, in columns.

    **Arguments:** `right`: which columns are aligned to the right. `narrow`: which are shortened where all together are
    too wide, the first of them before the others; the middle of a text is what is left out.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for column in narrow:
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        widths[column] = max(min(widths[column], _LEAST), widths[column] - max(excess, 0))
    lines: list[str] = []
    for row in rows:
        cells = [_shortened(cell, width) for cell, width in zip(row, widths, strict=True)]
        placed = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(placed).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def paragraph(head: str, text: str, *, indent: int) -> list[str]:
    """Returns lines of text behind a head, all at one indent."""
    lines = textwrap.wrap(text, WIDTH - indent, break_long_words=True) or [""]
    return [head.ljust(indent) + lines[0], *(" " * indent + line for line in lines[1:])]


def _shortened(cell: str, width: int) -> str:
    if len(cell) <= width:
        return cell
    front = (width - 1) // 2
    return f"{cell[:front]}…{cell[len(cell) - (width - 1 - front) :]}"
