"""Data: sources of samples, and the loader that brings them to the devices."""

from braidax.data.augment import center_crop as center_crop
from braidax.data.augment import flipped as flipped
from braidax.data.augment import random_crop as random_crop
from braidax.data.augment import random_resized_crop as random_resized_crop
from braidax.data.depth import Bounds as Bounds
from braidax.data.depth import Depth as Depth
from braidax.data.draws import Draws as Draws
from braidax.data.images.decoded import decoded as decoded
from braidax.data.loader import DataLoader as DataLoader
from braidax.data.loader import Knobs as Knobs
from braidax.data.loader import Stats as Stats
from braidax.data.order import Cursor as Cursor
from braidax.data.permutation import Permutation as Permutation
from braidax.data.prefetch import prefetch_to_device as prefetch_to_device
from braidax.data.sources import Source as Source
from braidax.data.sources import open as open
from braidax.data.storage import Remote as Remote
from braidax.data.transforms import mapped as mapped
from braidax.data.transforms import normalized as normalized
from braidax.data.transforms import resized as resized
