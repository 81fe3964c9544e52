"""Checkpoints that are taken behind the training step, durable once they exist, and verified when read."""

from braidax.checkpoint.adaptive import Adaptive
from braidax.checkpoint.checkpointer import Checkpointer
from braidax.checkpoint.interval import Every, Interval, Spacing, Verdict
from braidax.checkpoint.leaves import PaddedRows
from braidax.checkpoint.orbax import export_orbax, restore_orbax
from braidax.checkpoint.preempt import Preemption
from braidax.checkpoint.restoring import Restored, Skipped, restore
from braidax.checkpoint.safetensors import restore_safetensors

__all__ = [
    "Adaptive",
    "Checkpointer",
    "Every",
    "Interval",
    "PaddedRows",
    "Preemption",
    "Restored",
    "Skipped",
    "Spacing",
    "Verdict",
    "export_orbax",
    "restore",
    "restore_orbax",
    "restore_safetensors",
]
