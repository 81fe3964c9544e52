"""Braids loading, compute, communication and checkpoints into one JAX training step."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braidax import checkpoint, comm, data, errors, frame, gang, parallel, tune
    from braidax.checkpoint import Adaptive, Checkpointer, Every, Preemption
    from braidax.data import DataLoader, mix, open, prefetch_to_device
    from braidax.errors import BraidaxError
    from braidax.loop import evaluate, fit
    from braidax.parallel import (
        DataParallel,
        FullySharded,
        Hybrid,
        ParameterServers,
        Plan,
        RotatedTensorParallel,
        State,
        Step,
        TensorParallel,
        parallelize,
        value_and_grad,
    )
    from braidax.report import Report
    from braidax.spans import Trace
    from braidax.tune import plan

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "BraidaxError",
    "Checkpointer",
    "DataLoader",
    "DataParallel",
    "Every",
    "FullySharded",
    "Hybrid",
    "ParameterServers",
    "Plan",
    "Preemption",
    "Report",
    "RotatedTensorParallel",
    "State",
    "Step",
    "TensorParallel",
    "Trace",
    "__version__",
    "checkpoint",
    "comm",
    "data",
    "errors",
    "evaluate",
    "fit",
    "frame",
    "gang",
    "mix",
    "open",
    "parallel",
    "parallelize",
    "plan",
    "prefetch_to_device",
    "tune",
    "value_and_grad",
]

if sys.platform == "win32":
    from braidax.errors import MissingExtra

    raise MissingExtra(
        "braidax does not run on Windows: it locks files by the module 'fcntl', which Windows lacks; "
        "install it in the Windows Subsystem for Linux, where it runs as on Linux"
    )

# Where the names come from, imported at their first use: whoever needs only `braidax.comm` does not wait for JAX.
_HOMES = {
    "braidax": ("checkpoint", "comm", "data", "errors", "frame", "gang", "parallel", "tune"),
    "braidax.checkpoint": ("Adaptive", "Checkpointer", "Every", "Preemption"),
    "braidax.data": ("DataLoader", "mix", "open", "prefetch_to_device"),
    "braidax.errors": ("BraidaxError",),
    "braidax.loop": ("evaluate", "fit"),
    "braidax.parallel": (
        "DataParallel",
        "FullySharded",
        "Hybrid",
        "ParameterServers",
        "Plan",
        "RotatedTensorParallel",
        "State",
        "Step",
        "TensorParallel",
        "parallelize",
        "value_and_grad",
    ),
    "braidax.report": ("Report",),
    "braidax.spans": ("Trace",),
    "braidax.tune": ("plan",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = import_module(f"braidax.{name}") if home == "braidax" else getattr(import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'braidax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
