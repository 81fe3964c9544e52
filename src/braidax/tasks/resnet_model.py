"""Wide residual networks for images `[N, H, W, C]`, in Flax Linen.

Stages of residual blocks; each stage after the first halves the height and width and doubles the filters. Sources: He
et al., "Deep Residual Learning for Image Recognition" (arXiv:1512.03385); Zagoruyko and Komodakis, "Wide Residual
Networks" (arXiv:1605.07146).
"""

import functools
import math
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from braidax.errors import import_extra

if TYPE_CHECKING:
    from flax import linen as nn
else:
    nn = import_extra("flax.linen", "tasks", purpose="a model of braidax's tasks")


Norm = Literal["batch", "group"]
"""What normalizes behind a convolution: BatchNorm, whose averages are variables, or GroupNorm, which keeps nothing."""

_NUM_GROUPS = 32


class _ConvNorm(nn.Module):
    """A convolution without bias and the normalization after it, whose scale starts at `scale`."""

    filters: int
    size: int = 3
    stride: int = 1
    scale: float = 1.0
    norm: Norm = "batch"

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"], train: bool) -> Float[Array, "n i j f"]:
        window, strides, border = (self.size, self.size), (self.stride, self.stride), self.size // 2
        x = nn.Conv(self.filters, window, strides, padding=border, use_bias=False)(x)
        scale = nn.initializers.constant(self.scale)
        if self.norm == "group":
            return nn.GroupNorm(math.gcd(_NUM_GROUPS, self.filters), epsilon=1e-5, scale_init=scale)(x)
        return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, scale_init=scale)(x)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions, both `width_factor` times as wide as `filters`, and a shortcut around them."""

    filters: int
    width_factor: int = 1
    stride: int = 1
    norm: Norm = "batch"

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"], train: bool) -> Float[Array, "n i j f"]:
        width, conv = self.filters * self.width_factor, functools.partial(_ConvNorm, norm=self.norm)
        y = nn.relu(conv(width, stride=self.stride)(x, train))
        y = conv(width, scale=0.0)(y, train)
        return nn.relu(y + _shortcut(x, width, self.stride, self.norm, train))


class BottleneckBlock(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut around them; only the 3×3 one is `width_factor` times as wide."""

    filters: int
    width_factor: int = 1
    stride: int = 1
    norm: Norm = "batch"

    @nn.compact
    def __call__(self, x: Float[Array, "n h w c"], train: bool) -> Float[Array, "n i j f"]:
        inner, outer = self.filters * self.width_factor, self.filters * 4
        conv = functools.partial(_ConvNorm, norm=self.norm)
        # The inner 1×1 is as wide as the 3×3 that reads it, as in torchvision's wide_resnet50_2.
        y = nn.relu(conv(inner, size=1)(x, train))
        y = nn.relu(conv(inner, stride=self.stride)(y, train))
        y = conv(outer, size=1, scale=0.0)(y, train)
        return nn.relu(y + _shortcut(x, outer, self.stride, self.norm, train))


class WideResNet(nn.Module):
    """A wide residual network that classifies images.

    **Arguments:** `num_classes`: size of the output. `stage_sizes`: blocks in each stage. `num_filters`: filters of the
    stem and, before widening, of the first stage. `width_factor`: how much wider the blocks are than in a plain
    residual network. `block`: `"bottleneck"` or `"basic"`. `stem`: `"strided"` (7×7 by 2, then a 3×3 maximum by 2; for
    large images) or `"plain"` (3×3; for small ones). `norm`: `"batch"`, or `"group"` (32 groups at most; Wu and He,
    "Group Normalization", arXiv:1803.08494), where nothing is kept besides parameters.
    """

    num_classes: int
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    num_filters: int = 256
    width_factor: int = 2
    block: Literal["bottleneck", "basic"] = "bottleneck"
    stem: Literal["strided", "plain"] = "strided"
    norm: Norm = "batch"

    @nn.compact
    def __call__(self, images: Float[Array, "n h w c"], *, train: bool) -> Float[Array, "n classes"]:
        """Returns a logit per class; with `train`, and BatchNorm, batch statistics are used and `batch_stats` must be
        mutable."""
        block = BottleneckBlock if self.block == "bottleneck" else BasicBlock
        if self.stem == "strided":
            x = nn.relu(_ConvNorm(self.num_filters, size=7, stride=2, norm=self.norm)(images, train))
            x = jax.lax.reduce_window(
                x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
            )
        else:
            x = nn.relu(_ConvNorm(self.num_filters, norm=self.norm)(images, train))
        for stage, num_blocks in enumerate(self.stage_sizes):
            for i in range(num_blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                x = block(self.num_filters * 2**stage, self.width_factor, stride, self.norm)(x, train)
        return nn.Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


def _shortcut(x: jax.Array, filters: int, stride: int, norm: Norm, train: bool) -> Any:
    if x.shape[-1] == filters and stride == 1:
        return x
    return _ConvNorm(filters, size=1, stride=stride, norm=norm, name="shortcut")(x, train)
