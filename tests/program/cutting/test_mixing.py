"""What mixes samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from braidax.program import find_mixing, trace
from tests.support.program.cutting.models import draw, gpt, layers, residual


def normalized(params: Any, x: Any) -> Any:
    h = x @ params
    return ((h - h.mean(0)) ** 2).mean()  # mixed


def contrasted(params: Any, x: Any) -> Any:
    h = x @ params
    return jax.nn.log_softmax(h @ h.T).trace()  # mixed


def ranked(params: Any, x: Any) -> Any:
    return (jnp.cumsum(x @ params, 0) ** 2).sum()  # mixed


def in_a_loop(params: Any, x: Any) -> Any:
    def body(x: Any, _: Any) -> Any:
        h = jax.nn.relu(x @ params)
        return h / jnp.sqrt((h * h).sum(0)), None  # mixed

    return jax.lax.scan(body, x, length=3)[0].sum()


def by_weights(params: Any, x: Any) -> Any:
    losses = ((x @ params) ** 2).sum(1)
    return (losses / x[:, 0].sum()).sum()  # mixed


@pytest.mark.parametrize(
    ("loss", "trained"),
    [(normalized, True), (contrasted, True), (ranked, True), (in_a_loop, True), (by_weights, False)],
)
def test_statistics_of_the_batch_are_found(loss: Callable[..., Any], trained: bool) -> None:
    found = find_mixing(trace(loss, draw(3, 3), draw(4, 3)), {1: 0})
    first = loss.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()[first - 1 :]
    expected = first + next(at for at, line in enumerate(lines) if "# mixed" in line)
    assert found[0].line == f"{__file__}:{expected}"
    assert {one.trained for one in found} == {trained}


@pytest.mark.parametrize("case", [layers(), gpt(), residual()], ids=["layers", "gpt", "residual"])
def test_means_that_go_only_into_outputs_are_fine(case: Any) -> None:
    assert find_mixing(case.traced(), {len(case.args) - 1: 0}) == ()


def test_statistics_that_are_kept_as_variables() -> None:
    found = find_mixing(residual(norm=True).traced(), {3: 0})
    assert len({one.line for one in found}) == 2
    assert all(one.trained and "models.py" in one.line for one in found)
