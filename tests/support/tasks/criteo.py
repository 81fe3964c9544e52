"""Small logs of clicks in Criteo's format."""

from pathlib import Path
from typing import Any


def line_of(label: int, numbers: list[Any], values: list[Any]) -> str:
    """Returns a line of 13 numbers and 26 values."""
    return "\t".join(map(str, [label, *numbers, *values])) + "\n"


def write_criteo(path: Path, num_lines: int = 15) -> Path:
    """Writes lines in which a number and a value are missing. **Returns:** the path."""
    values = ["68fd1e64", "80e26c9b", ""] + [f"{number:08x}" for number in range(23)]
    lines = [line_of(number % 2, [number, "", -3, *range(10)], values) for number in range(num_lines)]
    path.write_text("".join(lines))
    return path
