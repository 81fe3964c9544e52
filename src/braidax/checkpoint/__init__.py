"""Checkpoints that are taken behind the training step, durable once they exist, and verified when read."""

from typing import TYPE_CHECKING

from braidax.checkpoint.checkpointer import Checkpointer
from braidax.checkpoint.interval.adaptive import Adaptive
from braidax.checkpoint.interval.preempt import Preemption
from braidax.checkpoint.interval.spacing import Every, Interval, Spacing, Verdict
from braidax.checkpoint.places.folder import Folder
from braidax.checkpoint.places.place import Place, Skipped
from braidax.checkpoint.saver import Saver
from braidax.checkpoint.snapshot.leaves import Outside, PaddedRows, TrueShapes
from braidax.first_use import at_first_use
from braidax.host_shard import HostShard

if TYPE_CHECKING:
    from braidax.checkpoint.format.exporting import export_safetensors, load_params
    from braidax.checkpoint.format.orbax import export_orbax, restore_orbax
    from braidax.checkpoint.format.replanned import Replanned
    from braidax.checkpoint.format.safetensors import restore_safetensors
    from braidax.checkpoint.messages import Messages
    from braidax.checkpoint.places.bucket import Bucket
    from braidax.checkpoint.places.neighbors import Neighbors
    from braidax.checkpoint.places.restoring import Restored, restore
    from braidax.checkpoint.snapshot.copies import copied

__all__ = [
    "Adaptive",
    "Bucket",
    "Checkpointer",
    "Every",
    "Folder",
    "HostShard",
    "Interval",
    "Messages",
    "Neighbors",
    "Outside",
    "PaddedRows",
    "Place",
    "Preemption",
    "Replanned",
    "Restored",
    "Saver",
    "Skipped",
    "Spacing",
    "TrueShapes",
    "Verdict",
    "copied",
    "export_orbax",
    "export_safetensors",
    "load_params",
    "restore",
    "restore_orbax",
    "restore_safetensors",
]

# What most runs do not need is imported at its first use.
_HOMES = {
    "Bucket": "places.bucket",
    "Messages": "messages",
    "Neighbors": "places.neighbors",
    "Replanned": "format.replanned",
    "Restored": "places.restoring",
    "restore": "places.restoring",
    "copied": "snapshot.copies",
    "export_orbax": "format.orbax",
    "export_safetensors": "format.exporting",
    "load_params": "format.exporting",
    "restore_orbax": "format.orbax",
    "restore_safetensors": "format.safetensors",
}

__getattr__ = at_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
