"""Braids loading, compute, communication and checkpoints into one JAX training step."""

from braidax import errors
from braidax.errors import BraidaxError

__version__ = "0.1.0"

__all__ = ["BraidaxError", "__version__", "errors"]
