"""Draws `batch_on_mesh.svg`: how one batch finds the eight devices of a 2 x 2 x 2 mesh."""

from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.data import simulated_mesh
from braidax.data.sharding.load_sharding import Bounds, Target, load_shardings, part_indices

ROWS, COLUMNS, CELL = 8, 8, 16
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")  # of the processes
SPEC = P("data", "seq")


def bounds_by_device(sharding: NamedSharding) -> list[Bounds]:
    """Returns the rows and columns that each device holds, by its number."""
    height, width = sharding.shard_shape((ROWS, COLUMNS))
    rows, columns = part_indices(sharding, 2)
    found: dict[int, Bounds] = {}
    devices = np.asarray(sharding.mesh.devices)
    for place in np.ndindex(devices.shape):
        top, left = int(rows[place]) * height, int(columns[place]) * width
        found[devices[place].id] = ((top, top + height), (left, left + width))
    return [found[number] for number in range(len(found))]


def grid(x: float, y: float, filled: list[tuple[Bounds, str]], cell: float) -> str:
    """Returns a batch as a grid of samples and tokens, some parts filled."""
    parts = [
        f'<rect x="{x + left * cell}" y="{y + top * cell}" width="{(right - left) * cell}" '
        f'height="{(bottom - top) * cell}" fill="{color}"/>'
        for ((top, bottom), (left, right)), color in filled
    ]
    lines = [
        f'<path d="M{x} {y + row * cell}h{COLUMNS * cell}" stroke="#fff" stroke-width="1"/>' for row in range(ROWS + 1)
    ]
    frame = f'<rect x="{x}" y="{y}" width="{COLUMNS * cell}" height="{ROWS * cell}" fill="#eee"/>'
    return frame + "".join(parts) + "".join(lines)


def text(x: float, y: float, words: str, *, size: int = 13, weight: str = "normal") -> str:
    """Returns a line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">{words}</text>'


def color_of(row: int, loaded: list[Bounds]) -> str:
    """Returns the color of the process that reads a row."""
    device = next(number for number, ((top, bottom), _) in enumerate(loaded) if top <= row < bottom)
    return COLORS[device // 2]


def draw() -> str:
    """Returns the picture."""
    mesh = simulated_mesh({"model": 2, "data": 2, "seq": 2}, num_processes=4)
    target = NamedSharding(mesh, SPEC)
    (loading,) = load_shardings([Target("x", jax.ShapeDtypeStruct((ROWS, COLUMNS << 12), np.int32), target)])
    loaded, held = bounds_by_device(loading.sharding), bounds_by_device(target)
    read = [(loaded[number], COLORS[number // 2]) for number in range(8)]
    panels = [
        text(20, 26, "1. read: every sample once", weight="bold"),
        grid(20, 70, read, 24),
        *(text(20 + 100 * (number // 2), 52 + 14 * (number % 2), f"process {number}", size=12) for number in range(4)),
        *(
            f'<rect x="{90 + 100 * (number // 2)}" y="{42 + 14 * (number % 2)}" width="11" height="11" fill="{color}"/>'
            for number, color in enumerate(COLORS)
        ),
        text(20, 285, "8 samples (rows)", size=12),
    ]
    for title, left, arrays in (("2. on the devices as read", 260, loaded), ("3. as the step takes it", 700, held)):
        panels.append(text(left, 26, title, weight="bold"))
        for number in range(8):
            model, data, seq = np.unravel_index(number, (2, 2, 2))
            x, y = left + 175 * int(model) + 84 * int(seq), 56 + 120 * int(data)
            (top, bottom), columns = arrays[number]
            bands = [(((row, row + 1), columns), color_of(row, loaded)) for row in range(top, bottom)]
            panels.append(grid(x, y, bands, 9))
            panels.append(text(x, y - 4, f"device {number}", size=11))
        panels += [text(left + 175 * model, 285, f"model={model}", size=12) for model in range(2)]
    panels.append(text(608, 150, "all_gather", size=12))
    panels.append(text(608, 182, "along model", size=12))
    panels.append('<path d="M612 160h64m-8 -5l8 5l-8 5" stroke="#333" fill="none" stroke-width="1.5"/>')
    style = 'font-family="sans-serif" fill="#222"'
    size = 'viewBox="0 0 1050 300" width="1050" height="300"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>' + "\n".join(panels) + "</svg>\n"


if __name__ == "__main__":
    (Path(__file__).parent / "batch_on_mesh.svg").write_text(draw())
