"""Braids loading, compute, communication and checkpoints into one JAX training step."""

from braidax import checkpoint, data, errors, parallel
from braidax.checkpoint import Checkpointer, Every
from braidax.data import Cursor, DataLoader, mix, open, prefetch_to_device
from braidax.errors import BraidaxError
from braidax.fit import evaluate, fit
from braidax.parallel import DataParallel, Plan, State, Step, parallelize, value_and_grad
from braidax.report import Report
from braidax.spans import Trace

__version__ = "0.1.0"

__all__ = [
    "BraidaxError",
    "Checkpointer",
    "Cursor",
    "DataLoader",
    "DataParallel",
    "Every",
    "Plan",
    "Report",
    "State",
    "Step",
    "Trace",
    "__version__",
    "checkpoint",
    "data",
    "errors",
    "evaluate",
    "fit",
    "mix",
    "open",
    "parallel",
    "parallelize",
    "prefetch_to_device",
    "value_and_grad",
]
