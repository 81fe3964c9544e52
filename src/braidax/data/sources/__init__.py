"""Sources: one file a format, and `open`, which recognizes it."""

from braidax.data.sources.recognize import open as open
from braidax.data.sources.source import Source as Source
