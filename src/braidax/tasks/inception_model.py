"""Inception v3 for images `[N, H, W, C]`, in Flax Linen.

Source: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (arXiv:1512.00567), with the numbers
of filters of the published weights, and batch normalization in the auxiliary head.
"""

from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from braidax.errors import import_extra

if TYPE_CHECKING:
    from flax import linen as nn
else:
    nn = import_extra("flax.linen", "tasks", purpose="a model of braidax's tasks")

MIN_SIZE = 75
"""Pixels of the smallest image: of a smaller one nothing is left before the last blocks."""

_Images = Float[Array, "n h w c"]
_Features = Float[Array, "n i j f"]
_DROPOUT = 0.5


class _ConvNorm(nn.Module):
    """A convolution without bias, batch normalization and a ReLU."""

    filters: int
    window: tuple[int, int]
    stride: int = 1
    padding: Literal["SAME", "VALID"] = "SAME"

    @nn.compact
    def __call__(self, x: _Images, train: bool) -> _Features:
        strides = (self.stride, self.stride)
        x = nn.Conv(self.filters, self.window, strides, padding=self.padding, use_bias=False)(x)
        return nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-3)(x))


_Chain = tuple[tuple[int, tuple[int, int]], ...]
"""Convolutions one behind the other: filters and window of each."""


class _Branches(nn.Module):
    """Chains of convolutions side by side, and one behind a 3×3 mean; their features are put together.

    `forks`: for chains that end in two convolutions side by side, 1×3 and 3×1, the filters of each; 0 for the others.
    """

    chains: tuple[_Chain, ...]
    pooled: int
    forks: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x: _Images, train: bool) -> _Features:
        forks = self.forks or (0,) * len(self.chains)
        found: list[Array] = []
        for chain, fork in zip(self.chains, forks, strict=True):
            y = x
            for filters, window in chain:
                y = _ConvNorm(filters, window)(y, train)
            found += [_ConvNorm(fork, window)(y, train) for window in ((1, 3), (3, 1))] if fork else [y]
        mean = nn.avg_pool(x, (3, 3), (1, 1), "SAME")
        return jnp.concatenate([*found, _ConvNorm(self.pooled, (1, 1))(mean, train)], axis=-1)


class _Reduction(nn.Module):
    """Chains whose last convolution halves height and width, and a 3×3 maximum that does the same."""

    chains: tuple[_Chain, ...]

    @nn.compact
    def __call__(self, x: _Images, train: bool) -> _Features:
        found: list[Array] = []
        for *before, (filters, window) in self.chains:
            y = x
            for inner, inner_window in before:
                y = _ConvNorm(inner, inner_window)(y, train)
            found.append(_ConvNorm(filters, window, 2, "VALID")(y, train))
        return jnp.concatenate([*found, nn.max_pool(x, (3, 3), (2, 2))], axis=-1)


class _Auxiliary(nn.Module):
    """The head beside the last blocks, which helps to train those before them."""

    num_classes: int
    filters: tuple[int, int]

    @nn.compact
    def __call__(self, x: _Images, train: bool) -> Float[Array, "n classes"]:
        if min(x.shape[1:3]) >= 5:
            x = nn.avg_pool(x, (5, 5), (3, 3))
        x = _ConvNorm(self.filters[0], (1, 1))(x, train)
        # On images of 299 pixels there are 5×5 features, and the window sees them all; on smaller ones fewer.
        x = _ConvNorm(self.filters[1], (5, 5), padding="VALID" if min(x.shape[1:3]) >= 5 else "SAME")(x, train)
        return nn.Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


class InceptionV3(nn.Module):
    """Inception v3, which classifies images.

    **Arguments:** `num_classes`: size of the output. `width`: filters of each convolution in proportion to the
    published ones. `num_blocks`: of each of the three kinds, which stand at 35×35, 17×17 and 8×8 features. `head`:
    `"auxiliary"` adds a head beside the last blocks to the `"single"` one.
    """

    num_classes: int
    width: float = 1.0
    num_blocks: tuple[int, int, int] = (3, 4, 2)
    head: Literal["single", "auxiliary"] = "auxiliary"

    @nn.compact
    def __call__(
        self, images: _Images, *, train: bool
    ) -> Float[Array, "n classes"] | tuple[Float[Array, "n classes"], Float[Array, "n classes"]]:
        """Returns a logit per class, and with an auxiliary head a second one from there.

        With `train`, batch statistics are used, `batch_stats` must be mutable, and an rng `"dropout"` is needed.
        """
        num_first, num_second, num_third = self.num_blocks
        x = _ConvNorm(self._filters(32), (3, 3), 2, "VALID")(images, train)
        x = _ConvNorm(self._filters(32), (3, 3), padding="VALID")(x, train)
        x = nn.max_pool(_ConvNorm(self._filters(64), (3, 3))(x, train), (3, 3), (2, 2))
        x = _ConvNorm(self._filters(80), (1, 1))(x, train)
        x = nn.max_pool(_ConvNorm(self._filters(192), (3, 3), padding="VALID")(x, train), (3, 3), (2, 2))
        for number in range(num_first):
            x = self._small_windows(32 if number == 0 else 64)(x, train)
        x = self._reduction(((384, (3, 3)),), ((64, (1, 1)), (96, (3, 3)), (96, (3, 3))))(x, train)
        for number in range(num_second):
            inner = 128 if number == 0 else 192 if number == num_second - 1 else 160
            x = self._long_windows(inner)(x, train)
        auxiliary = None
        if self.head == "auxiliary":
            auxiliary = _Auxiliary(self.num_classes, (self._filters(128), self._filters(768)))(x, train)
        square = ((192, (1, 1)), (320, (3, 3)))
        x = self._reduction(square, ((192, (1, 1)), (192, (1, 7)), (192, (7, 1)), (192, (3, 3))))(x, train)
        for _ in range(num_third):
            x = self._forked_windows()(x, train)
        x = nn.Dropout(_DROPOUT, deterministic=not train)(jnp.mean(x, axis=(1, 2)))
        logits = nn.Dense(self.num_classes)(x)
        return logits if auxiliary is None else (logits, auxiliary)

    def _small_windows(self, pooled: int) -> _Branches:
        chains = ((64, (1, 1)),), ((48, (1, 1)), (64, (5, 5))), ((64, (1, 1)), (96, (3, 3)), (96, (3, 3)))
        return _Branches(self._scaled(*chains), self._filters(pooled))

    def _long_windows(self, inner: int) -> _Branches:
        wide, tall = (1, 7), (7, 1)
        short = ((inner, (1, 1)), (inner, wide), (192, tall))
        long = ((inner, (1, 1)), (inner, tall), (inner, wide), (inner, tall), (192, wide))
        return _Branches(self._scaled(((192, (1, 1)),), short, long), self._filters(192))

    def _forked_windows(self) -> _Branches:
        chains = self._scaled(((320, (1, 1)),), ((384, (1, 1)),), ((448, (1, 1)), (384, (3, 3))))
        return _Branches(chains, self._filters(192), (0, self._filters(384), self._filters(384)))

    def _reduction(self, *chains: _Chain) -> _Reduction:
        return _Reduction(self._scaled(*chains))

    def _scaled(self, *chains: _Chain) -> tuple[_Chain, ...]:
        return tuple(tuple((self._filters(filters), window) for filters, window in chain) for chain in chains)

    def _filters(self, published: int) -> int:
        return max(1, round(published * self.width))
