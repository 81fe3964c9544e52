"""Programs that tests compile: each once for all tests of a run, and for the next run."""

import contextlib
import fcntl
import functools
import inspect
import os
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import compilation_cache, compiler
from jax._src.interpreters import mlir
from jax._src.lru_cache import LRUCache

from tests.support.tree import ROOT

COMPILED = ROOT / ".pytest_cache" / "compiled"
_WAIT_SECONDS = 20.0  # for who compiles the same program, and may have been stopped
_MOST_LOWERED = 200  # programs in one context, which keeps their constants

_compile = compiler._compile_and_write_cache  # pyright: ignore[reportPrivateUsage]
_read: Any = compiler._cache_read  # pyright: ignore[reportPrivateUsage]
_READ_TAKES_CALLBACKS = "host_callbacks" in inspect.signature(_read).parameters  # from JAX 0.11 on
_make_context, _contexts = mlir.make_ir_context, threading.local()


def _write_whole(self: LRUCache, key: str, value: bytes) -> None:
    """Stores a program under another name first: others read while it is written, and who writes may be killed."""
    part = self.path / f"{key}.{os.getpid()}.{threading.get_ident()}.part"
    part.write_bytes(value)
    part.replace(self.path / f"{key}-cache")


def _compile_once(
    backend: Any,
    computation: Any,
    devices: Any,
    options: Any,
    callbacks: Sequence[Any],
    module: str,
    key: str,
) -> Any:
    """Compiles a program, or waits for another thread or process that does: workers and servers begin at once."""
    cache = compilation_cache._get_cache(backend)  # pyright: ignore[reportPrivateUsage]
    if callbacks or not isinstance(cache, LRUCache):
        return _compile(backend, computation, devices, options, callbacks, module, key)
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context((cache.path / f"{key}.lock").open("w"))
        except OSError:  # the folder is gone
            return _compile(backend, computation, devices, options, callbacks, module, key)
        deadline = time.monotonic() + _WAIT_SECONDS
        while not _locked(lock.fileno()) and time.monotonic() < deadline:
            time.sleep(0.005)
        found, _ = _read(module, key, options, backend, devices, *[callbacks] * _READ_TAKES_CALLBACKS)
        return found or _compile(backend, computation, devices, options, callbacks, module, key)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _context() -> Any:
    """Returns what programs are written down in: to make it takes 3 ms, as long as to write a small one down."""
    lowered = getattr(_contexts, "lowered", 0)
    if lowered % _MOST_LOWERED == 0:
        _contexts.made = _make_context()
    _contexts.lowered = lowered + 1
    return _contexts.made


def share_compiled() -> None:
    """Lets this process take what others have compiled, and leave to them what it compiles."""
    mlir.make_ir_context = _context
    jax.config.update("jax_compilation_cache_dir", str(COMPILED))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    LRUCache.put = _write_whole
    compiler._compile_and_write_cache = _compile_once  # pyright: ignore[reportPrivateUsage]
    # Programs are written more often than read: to write them shorter by a sixth takes three times as long.
    compilation_cache.compress_executable = functools.partial(zlib.compress, level=1)
    compilation_cache.decompress_executable = zlib.decompress
