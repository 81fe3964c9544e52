"""GPT-2's shape with mixtures of experts: which go around, or stay and are sent tokens, beside the other ways."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import braidax as bx
from benchmarks.harness import Report, say, systems
from benchmarks.harness.gpt2 import Shape
from benchmarks.harness.systems import HELD, OURS, System
from benchmarks.rotated import ways
from benchmarks.rotated.memory import PEAK, SENT, TOTAL
from benchmarks.rotated.ways import DDP, RTP
from braidax.parallel import Rotated
from braidax.program import total_sent

AROUND = "ours, RotatedTensorParallel, experts go around"
_STRATEGIES = {
    DDP: bx.DataParallel(),
    OURS: bx.FullySharded(),
    AROUND: bx.RotatedTensorParallel({"params/layers/up": Rotated(1), "params/layers/down": Rotated(1)}),
    RTP: bx.RotatedTensorParallel(),
}


@dataclass(frozen=True)
class Mixture(Shape):
    """A shape whose wider part is one of many: each token is seen by the two best of its experts.

    **Fields:** `experts`: how many a layer has. `room`: places of all experts together, for each token.
    """

    experts: int = 8
    room: float = 2.5

    @property
    def capacity(self) -> int:
        """Places of an expert for the tokens of a sample."""
        return max(1, round(self.room * self.length / self.experts))

    def init(self, key: jax.Array) -> dict[str, Any]:
        """The first parameters."""
        made = super().init(key)
        d, num, keys = self.width, self.layers, jax.random.split(key, 3)
        shapes = {"router": (d, self.experts), "up": (self.experts, d, 4 * d), "down": (self.experts, 4 * d, d)}
        mixtures = {
            name: jax.random.normal(one, (num, *shape)) * 0.02
            for one, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        layers = {name: leaf for name, leaf in made["layers"].items() if name not in ("up_bias", "down_bias")}
        return {**made, "layers": {**layers, **mixtures, "down_bias": jnp.zeros((num, d))}}

    def wider(self, h: jax.Array, w: Any) -> jax.Array:
        """What the two best experts of each token give, by their gates; a sample is a group (GShard)."""
        picked_gates, picked = jax.lax.top_k(jax.nn.softmax(h @ w["router"]), 2)
        masks = jax.nn.one_hot(jnp.moveaxis(picked, -1, 1), self.experts)  # [sample, rank, token, expert]
        flat = masks.reshape(len(h), -1, self.experts)
        places = ((jnp.cumsum(flat, 1) - 1) * flat).sum(-1).reshape(masks.shape[:-1]).astype(jnp.int32)
        at = jax.nn.one_hot(places, self.capacity)  # nothing for those without a place
        combine = jnp.einsum("gtr,grte,grtc->gtec", picked_gates, masks, at)
        given = jnp.einsum("gtec,gtd->gecd", (combine > 0).astype(h.dtype), h)
        hidden = jax.nn.gelu(jnp.einsum("gecd,edf->gecf", given, w["up"]))
        return jnp.einsum("gtec,gecd->gtd", combine, jnp.einsum("gecf,efd->gecd", hidden, w["down"]))


MIXTURES = (DDP, OURS, HELD, AROUND, RTP)


def experts(report: Report, shape: Mixture, chosen: Sequence[str], num_devices: int) -> None:
    """Memory and bytes of the chosen ways, at as many samples a device."""
    case = f"GPT-2, {shape.layers} layers of width {shape.width}, {shape.experts} experts each"
    whole = replace(shape, batch=shape.batch * num_devices)
    along = ways.mesh((num_devices,))
    for way in chosen:
        step, found = systems.ours(whole, along, {"data": _STRATEGIES[OURS if way == HELD else way]})
        _add(report, case, way, step, systems.held(whole, along, step) if way == HELD else found)
    jax.clear_caches()


def _add(report: Report, case: str, way: str, step: bx.Step, found: System) -> None:
    sent = sum(total_sent(found.collectives()).values())
    report.add(case, way, TOTAL, "MiB", [found.memory_bytes() / 2**20])
    report.add(case, way, PEAK, "MiB", [found.peak_bytes(step) / 2**20])
    report.add(case, way, SENT, "MB", [sent / 1e6])
    say(f"  {case}, {way}: {found.memory_bytes() / 2**20:.0f} MiB, {sent / 1e6:.0f} MB")
