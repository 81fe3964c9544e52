"""Names of leaves, and sentences about differences."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from braidax.program import difference, join, named_leaves


class Pair(NamedTuple):
    first: Any
    second: Any


def test_leaves_have_paths() -> None:
    tree = {"dense": Pair(jnp.ones(1), [2.0])}
    assert [path for path, _ in named_leaves(tree, "params")] == ["params/dense/first", "params/dense/second/0"]
    assert [path for path, _ in named_leaves(3.0, "params")] == ["params"]
    assert [path for path, _ in named_leaves({"a": 1})] == ["a"]
    assert [join("a", "b"), join("", "b"), join("a", "")] == ["a/b", "b", "a"]


@pytest.mark.parametrize(
    ("got", "sentence"),
    [
        ({"x": jnp.ones(2), "y": jnp.ones(3)}, None),
        ({"x": jnp.ones(2)}, "batch/y is missing (expected float32[3])"),
        ({"x": jnp.ones(2), "y": jnp.ones(4)}, "batch/y is float32[4], expected float32[3]"),
        ({"x": jnp.ones(2, int), "y": jnp.ones(3)}, "batch/x is int32[2], expected float32[2]"),
        ({"x": jnp.ones(2), "y": jnp.ones(3), "z": jnp.ones(1)}, "batch/z is unexpected (float32[1])"),
    ],
)
def test_the_first_difference_is_told(got: Any, sentence: str | None) -> None:
    assert difference({"x": jnp.ones(2), "y": jnp.ones(3)}, got, "batch") == sentence


def test_equal_leaves_in_other_containers_differ() -> None:
    assert "expected PyTreeDef" in str(difference((jnp.ones(2),), [jnp.ones(2)], "batch"))
