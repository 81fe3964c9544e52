"""Data: sources of samples, and the loader that brings them to the devices."""

from typing import TYPE_CHECKING

from braidax.data.as_arrow import as_arrow as as_arrow
from braidax.data.fetching.depth import Bounds as Bounds
from braidax.data.fetching.depth import Depth as Depth
from braidax.data.knobs import Knobs as Knobs
from braidax.data.knobs import Stats as Stats
from braidax.data.loader import DataLoader as DataLoader
from braidax.data.open import open as open
from braidax.data.open_formats import open_csv as open_csv
from braidax.data.open_formats import open_images as open_images
from braidax.data.open_formats import open_table as open_table
from braidax.data.open_formats import open_tokens as open_tokens
from braidax.data.prefetch import prefetch_to_device as prefetch_to_device
from braidax.data.sampling.draws import Draws as Draws
from braidax.data.sampling.order import Cursor as Cursor
from braidax.data.sampling.permutation import Permutation as Permutation
from braidax.data.sharding.explain import Explanation as Explanation
from braidax.data.sharding.explain import simulated_mesh as simulated_mesh
from braidax.data.source import VARYING as VARYING
from braidax.data.source import Source as Source
from braidax.data.source import Stamped as Stamped
from braidax.data.source import to_numpy as to_numpy
from braidax.data.storage import Remote as Remote
from braidax.data.transforms.columns import select as select
from braidax.data.transforms.concatenation import concat as concat
from braidax.data.transforms.cutting import split as split
from braidax.data.transforms.cutting import take as take
from braidax.data.transforms.each_sample import map as map
from braidax.data.transforms.filtering import filter as filter
from braidax.data.transforms.mixture import mix as mix
from braidax.data.transforms.skipping import skipping as skipping
from braidax.data.workers.processes import in_processes as in_processes
from braidax.first_use import at_first_use

if TYPE_CHECKING:
    from braidax.data.naming import class_names as class_names
    from braidax.data.transforms.images.augment import center_crop as center_crop
    from braidax.data.transforms.images.augment import flipped as flipped
    from braidax.data.transforms.images.augment import random_crop as random_crop
    from braidax.data.transforms.images.augment import random_resized_crop as random_resized_crop
    from braidax.data.transforms.images.decoded import decoded as decoded
    from braidax.data.transforms.mapped import mapped as mapped
    from braidax.data.transforms.mapped import normalized as normalized
    from braidax.data.transforms.mapped import resized as resized
    from braidax.data.transforms.text.measuring import Measured as Measured
    from braidax.data.transforms.text.packing import packed as packed
    from braidax.data.transforms.text.text import padded as padded
    from braidax.data.transforms.text.text import tokenized as tokenized

# What few programs need is imported at its first use.
_HOMES = {
    "class_names": "naming",
    "mapped": "transforms.mapped",
    "normalized": "transforms.mapped",
    "resized": "transforms.mapped",
    "center_crop": "transforms.images.augment",
    "flipped": "transforms.images.augment",
    "random_crop": "transforms.images.augment",
    "random_resized_crop": "transforms.images.augment",
    "decoded": "transforms.images.decoded",
    "Measured": "transforms.text.measuring",
    "packed": "transforms.text.packing",
    "padded": "transforms.text.text",
    "tokenized": "transforms.text.text",
}

__getattr__ = at_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
