"""What the tests of tasks share: compiling quickly what runs only for a moment."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def quickly_compiled() -> Iterator[None]:
    """Draws by a generator that compiles quickly: a draw by JAX's own takes 0.3 s, and a model has a hundred."""
    with jax.default_prng_impl("unsafe_rbg"):
        yield
