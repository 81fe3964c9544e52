"""Checkpoints that are taken behind the training step, durable once they exist, and verified when read."""

from braidax.checkpoint.checkpointer import Checkpointer, Skipped
from braidax.checkpoint.interval import Every, Interval

__all__ = ["Checkpointer", "Every", "Interval", "Skipped"]
