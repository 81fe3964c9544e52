"""Draws `ring.svg`: which part of the weights is on which device, step by step."""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import braidax as bx
from braidax.parallel import Plan, Rotated

NUM_DEVICES, CELL, LEFT, TOP = 4, 46, 110, 92
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")  # of the parts


def planned() -> Plan:
    """Returns the plan of a small network on a ring of devices."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",))

    def init(key: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        return {"up": jax.random.normal(first, (64, 256)), "down": jax.random.normal(second, (256, 64))}

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        return ((jax.nn.gelu(batch @ params["up"]) @ params["down"]) ** 2).mean()

    strategies = {"data": bx.RotatedTensorParallel(min_bytes=0)}
    batch = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    return bx.parallelize(loss, optax.sgd(0.1), mesh, strategies, init=init, batch=batch).plan


def text(x: float, y: float, words: str, *, size: int = 13, weight: str = "normal") -> str:
    """Returns a line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="#222">{words}</text>'


def cell(column: int, device: int, part: int, words: str, *, is_gradient: bool = False) -> str:
    """Returns what a device has at a step: a part of the weights, or the sum of its gradient."""
    x, y = LEFT + column * CELL, TOP + device * CELL
    fill = "#fff" if is_gradient else COLORS[part]
    color = COLORS[part] if is_gradient else "#fff"
    box = (
        f'<rect x="{x + 2}" y="{y + 2}" width="{CELL - 4}" height="{CELL - 4}" rx="5" fill="{fill}" '
        f'stroke="{COLORS[part]}" stroke-width="2"/>'
    )
    middle = x + CELL / 2
    return box + (
        f'<text x="{middle}" y="{y + CELL / 2 + 5}" font-size="13" text-anchor="middle" fill="{color}">{words}</text>'
    )


def draw() -> str:
    """Returns the picture."""
    plan = planned()
    (axis,) = plan.axes
    turning = [
        f"{one.path.removeprefix('params/')} along dim {placement.dim}"
        for one in plan.variables
        for placement in one.placements
        if isinstance(placement, Rotated)
    ]
    count = axis.size
    back = count + 1  # where the backward pass begins, a column free before it
    parts = [
        text(12, 24, f"A ring of {count} devices: {' and '.join(turning)} in {count} parts", weight="bold", size=15),
        text(12, 44, "Each device keeps its samples; at each step its part has come from the device below it."),
        text(LEFT, TOP - 12, "forward", weight="bold"),
        text(LEFT + back * CELL, TOP - 12, "backward, with the sum of each part's gradient behind it", weight="bold"),
    ]
    for device in range(count):
        parts.append(text(12, TOP + device * CELL + CELL / 2 + 5, f"device {device}"))
        for step in range(count):
            part = (device + step) % count
            parts.append(cell(step, device, part, f"W{part}"))
            column = back + 2 * step
            parts.append(cell(column, device, part, f"W{part}"))
            if step:
                parts.append(cell(column + 1, device, part, f"g{part}", is_gradient=True))
        parts.append(cell(back + 2 * count, device, device, f"g{device}", is_gradient=True))
    bottom = TOP + count * CELL
    hops = f"{count - 1} hops forward, {count - 1} backward, {count - 1} for gradients"
    parts.append(text(12, bottom + 22, f"{hops}; the part at home is differentiated last, under the last hop"))
    width, height = LEFT + (back + 2 * count + 1) * CELL + 12, bottom + 38
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return f'{head}<rect width="{width}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    (Path(__file__).parent / "ring.svg").write_text(draw())
