"""The wide residual network: as large as published, and shaped as it says."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braidax.tasks.resnet_model import WideResNet


def shapes(model: WideResNet, images: tuple[int, ...]) -> Any:
    return jax.eval_shape(lambda key: model.init(key, jnp.zeros(images), train=False), jax.random.key(0))


def num_parameters(model: WideResNet, images: tuple[int, ...] = (1, 224, 224, 3)) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(model, images)["params"]))


@pytest.mark.parametrize(
    ("model", "published"),
    [
        # As torchvision lists them: resnet18, resnet50, wide_resnet50_2.
        (WideResNet(1000, stage_sizes=(2, 2, 2, 2), num_filters=64, width_factor=1, block="basic"), 11_689_512),
        (WideResNet(1000, num_filters=64, width_factor=1), 25_557_032),
        (WideResNet(1000, num_filters=64, width_factor=2), 68_883_240),
    ],
)
def test_it_has_as_many_parameters_as_published(model: WideResNet, published: int) -> None:
    assert num_parameters(model) == published


def test_wide_basic_blocks_have_as_many_parameters_as_the_formula_says() -> None:
    # One block at 8 filters and width 2: stem, two 3×3 convolutions, a 1×1 shortcut, their norms, a dense layer.
    model = WideResNet(10, stage_sizes=(1,), num_filters=8, width_factor=2, block="basic", stem="plain")
    stem, first, second, shortcut = 9 * 1 * 8 + 16, 9 * 8 * 16 + 32, 9 * 16 * 16 + 32, 8 * 16 + 32
    assert num_parameters(model, (1, 8, 8, 1)) == stem + first + second + shortcut + 16 * 10 + 10


def blocks_of(model: WideResNet, size: int) -> Any:
    """Returns the shapes of what each part makes of two square images, of parameters that one of them has made."""

    def run(key: Any) -> Any:
        variables = model.init(key, jnp.zeros((1, size, size, 1)), train=False)
        return model.apply(variables, jnp.zeros((2, size, size, 1)), train=False, capture_intermediates=True)

    _, state = jax.eval_shape(run, jax.random.key(0))
    return state["intermediates"]


def test_every_stage_after_the_first_halves_the_image() -> None:
    blocks = blocks_of(WideResNet(7, stage_sizes=(1, 1), num_filters=4, block="basic", stem="plain"), 8)
    assert [blocks[f"BasicBlock_{i}"]["__call__"][0].shape for i in range(2)] == [(2, 8, 8, 8), (2, 4, 4, 16)]
    assert blocks["__call__"][0].shape == (2, 7)


def test_the_strided_stem_quarters_the_image() -> None:
    blocks = blocks_of(WideResNet(7, stage_sizes=(1,), num_filters=4), 30)
    assert blocks["BottleneckBlock_0"]["__call__"][0].shape == (2, 8, 8, 16)


def test_batch_statistics_are_those_of_the_batch() -> None:
    model = WideResNet(3, stage_sizes=(1,), num_filters=2, block="basic", stem="plain")
    images = jnp.asarray(np.random.default_rng(1).normal(size=(16, 8, 8, 1)), jnp.float32)
    variables = jax.jit(lambda key: model.init(key, images, train=False))(jax.random.key(0))
    _, updated = jax.jit(lambda variables: model.apply(variables, images, train=True, mutable=["batch_stats"]))(
        variables
    )
    kernel: Any = variables["params"]["_ConvNorm_0"]["Conv_0"]["kernel"]
    outputs = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    moved: Any = updated["batch_stats"]["_ConvNorm_0"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(moved, 0.1 * outputs.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("quickly_compiled")
def test_groups_normalize_each_image_by_itself() -> None:
    """With as many parameters, and nothing kept besides."""
    sizes: dict[str, Any] = {"stage_sizes": (1, 1), "num_filters": 8, "block": "basic", "stem": "plain"}
    model = WideResNet(5, norm="group", **sizes)
    images = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8, 8, 1)), jnp.float32)
    assert num_parameters(model, images.shape) == num_parameters(WideResNet(5, **sizes), images.shape)
    variables = jax.jit(lambda key: model.init(key, images, train=False))(jax.random.key(0))
    assert [*variables] == ["params"]

    @jax.jit
    def outputs(variables: Any) -> tuple[Any, Any, Any]:
        alone = jax.lax.map(lambda image: model.apply(variables, image[None], train=True)[0], images)
        return model.apply(variables, images, train=True), alone, model.apply(variables, images, train=False)

    together, alone, tested = outputs(variables)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(tested, together, atol=1e-6)
