"""Checkpoints that are taken behind the training step, durable once they exist, and verified when read."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from braidax.checkpoint.adaptive import Adaptive
from braidax.checkpoint.checkpointer import Checkpointer
from braidax.checkpoint.interval import Every, Interval, Spacing, Verdict
from braidax.checkpoint.leaves import Outside, PaddedRows, TrueShapes
from braidax.checkpoint.preempt import Preemption
from braidax.checkpoint.replanned import Replanned
from braidax.checkpoint.restoring import Restored, Skipped, restore
from braidax.checkpoint.tiers import Saver, Tier, Tiers

if TYPE_CHECKING:
    from braidax.checkpoint.archive import Archive
    from braidax.checkpoint.copies import copied
    from braidax.checkpoint.lockstep import Messages
    from braidax.checkpoint.orbax import export_orbax, restore_orbax
    from braidax.checkpoint.peers import Peers
    from braidax.checkpoint.safetensors import restore_safetensors

__all__ = [
    "Adaptive",
    "Archive",
    "Checkpointer",
    "Every",
    "Interval",
    "Messages",
    "Outside",
    "PaddedRows",
    "Peers",
    "Preemption",
    "Replanned",
    "Restored",
    "Saver",
    "Skipped",
    "Spacing",
    "Tier",
    "Tiers",
    "TrueShapes",
    "Verdict",
    "copied",
    "export_orbax",
    "restore",
    "restore_orbax",
    "restore_safetensors",
]

# What most runs do not need is imported at its first use.
_HOMES = {
    "Archive": "archive",
    "Messages": "lockstep",
    "Peers": "peers",
    "copied": "copies",
    "export_orbax": "orbax",
    "restore_orbax": "orbax",
    "restore_safetensors": "safetensors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'braidax.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(f"braidax.checkpoint.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
