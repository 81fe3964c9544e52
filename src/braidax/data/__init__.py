"""Data: sources of samples, and the loader that brings them to the devices."""

from braidax.data.depth import Bounds as Bounds
from braidax.data.depth import Depth as Depth
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
