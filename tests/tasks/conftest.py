"""What the tests of tasks share: compiling quickly what runs only for a moment."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def quickly_compiled() -> Iterator[None]:
    """Takes a third of the time to compile: a draw by JAX's own generator takes 0.3 s, and a model has a hundred."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        with jax.default_prng_impl("unsafe_rbg"):
            yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
