"""Programs that tests compile: each once for all tests of a run, and for the next run."""

import functools
import os
import threading
import zlib

import jax
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from tests.support.tree import ROOT

COMPILED = ROOT / ".pytest_cache" / "compiled"


def _write_whole(self: LRUCache, key: str, value: bytes) -> None:
    """Stores a program under another name first: others read while it is written, and who writes may be killed."""
    part = self.path / f"{key}.{os.getpid()}.{threading.get_ident()}.part"
    part.write_bytes(value)
    part.replace(self.path / f"{key}-cache")


def share_compiled() -> None:
    """Lets this process take what others have compiled, and leave to them what it compiles."""
    jax.config.update("jax_compilation_cache_dir", str(COMPILED))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    LRUCache.put = _write_whole
    # Programs are written more often than read: to write them shorter by a sixth takes three times as long.
    compilation_cache.compress_executable = functools.partial(zlib.compress, level=1)
    compilation_cache.decompress_executable = zlib.decompress
