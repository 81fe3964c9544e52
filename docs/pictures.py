"""Draws `plan.svg`, `schedules.svg` and `stalls.svg`: what is on pages that the library makes, of examples."""

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import braidax as bx
from braidax.parallel.stages.schedules import Costs, one_forward_one_backward, simulate, stacked_html, zero_bubble_h1
from braidax.spans import Span

NUM_DEVICES, WIDTH, LAYERS, WORDS, LENGTH = 8, 768, 12, 50_257, 1_024
GRADIENTS, APPLY = 0.015, 0.004  # seconds
LATE, SAVED = {3: 0.012}, {6: 0.008}  # seconds that steps wait, by the number of the step
_STYLE = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_DARK = re.compile(r"@media \(prefers-color-scheme: ?dark\) ?\{ ?:root ?\{[^}]*\} ?\}")


def on_white(page: str, number: int = 0) -> str:
    """Returns a drawing of a page as a file of its own, in the colors of light screens.

    **Arguments:** `number`: which drawing, counted from 0.
    """
    (style,) = _STYLE.findall(page)
    drawing = re.findall(r"<svg .*?</svg>", page, re.DOTALL)[number]
    light = " ".join(_DARK.sub("", style).replace("light dark", "light").split())
    head, _, rest = drawing.partition(">")
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif"', 1)
    back = '<g><rect width="100%" height="100%" fill="#fff"/></g>'
    return f"{head}><style>{light}</style>{back}{rest}\n"


def plan() -> str:
    """Returns the treemap of a GPT of 12 layers with AdamW, fully sharded over 8 devices."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("data",))
    shapes = {
        "words": (WORDS, WIDTH),
        "positions": (LENGTH, WIDTH),
        "attention": (LAYERS, WIDTH, 4 * WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
        "norms": (LAYERS, 2, WIDTH),
    }

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {name: jax.random.normal(key, shape) for name, shape in shapes.items()}

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        query, key, value, out = jnp.split(weights["attention"], 4, axis=1)
        x = x * weights["norms"][0]
        scores = jax.nn.softmax((x @ query) @ jnp.swapaxes(x @ key, -1, -2))
        x = x + scores @ (x @ value) @ out
        return x + jax.nn.gelu((x * weights["norms"][1]) @ weights["up"]) @ weights["down"], None

    def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
        x = params["words"][batch] + params["positions"]
        layers = {name: params[name] for name in ("attention", "up", "down", "norms")}
        x, _ = jax.lax.scan(layer, x, layers)
        logits = x @ params["words"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch).mean()

    batch = jax.ShapeDtypeStruct((NUM_DEVICES, LENGTH), jnp.int32)
    step = bx.parallelize(loss, optax.adamw(1e-3), mesh, {"data": bx.FullySharded()}, init=init, batch=batch)
    return on_white(step.plan.to_html(), 1)


def schedules() -> str:
    """Returns two schedules of 4 stages and 8 microbatches, in which each pass takes a second."""
    costs = Costs.even(4, transfer=0.2)
    panels = {name: simulate(make(4, 8), costs) for name, make in SCHEDULES.items()}
    return on_white(stacked_html(panels, title="Two schedules"))


def stalls() -> str:
    """Returns eight steps of a loop with made-up times: one waits for data, one for a snapshot."""
    trace = bx.Trace()

    def did(lane: str, name: str, start: float, seconds: float) -> None:
        trace.record(Span(lane, name, "main", start, seconds, 0))

    now = 0.0
    did("loop", "begin", now, 0.0)
    for number in range(1, 9):
        late, saved = LATE.get(number, 0.0), SAVED.get(number, 0.0)
        waited = max(0.0005, late)
        did("loop", "data wait", now, waited)
        did("read", "train.npz", now, waited + 0.004)
        did("loop", "dispatch", now + waited, 0.0012)
        begins = now + late
        did("devices", "gradients", begins, GRADIENTS)
        if saved:
            did("loop", "snapshot stall", begins + GRADIENTS, saved)
        did("devices", "apply", begins + GRADIENTS + saved, APPLY)
        if number in (6, 7):
            did("checkpoint", "persist", begins + (GRADIENTS + saved if number == 6 else 0.0), APPLY + 0.006)
        did("step", f"step {number}", begins, GRADIENTS + saved + APPLY)
        now = begins + GRADIENTS + saved + APPLY
    return on_white(trace.to_html())


SCHEDULES = {"1F1B": one_forward_one_backward, "ZB-H1": zero_bubble_h1}
PICTURES: dict[str, Callable[[], str]] = {"plan.svg": plan, "schedules.svg": schedules, "stalls.svg": stalls}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    for name, draw in PICTURES.items():
        (Path(__file__).parent / name).write_text(draw())
