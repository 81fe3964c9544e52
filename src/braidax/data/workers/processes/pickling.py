"""Sources on their way to another process: packed once, in memory that all workers map.

Functions and classes of `__main__` and of notebooks travel by value, so no script needs a guard. Large arrays lie
beside the pickle and are mapped, not copied, by each worker. What is mapped from a file is mapped again from that file.
Locks and thread-locals guard the memory of one process: they begin anew in the next.
"""

import io
import mmap
import os
import pickle
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from braidax.data.workers.alignment import ALIGNMENT, aligned
from braidax.data.workers.processes.memory import nameless_file
from braidax.errors import ArgumentError, FormatError

_BESIDE_BYTES = 1 << 16  # buffers from this size on lie beside the pickle
_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())


def pack(source: Any) -> int:
    """Packs a source into a nameless file, and returns the file's descriptor, which the caller closes.

    **Raises:** `ArgumentError` naming the part that cannot be pickled.
    """
    beside: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _BESIDE_BYTES:
            return True
        beside.append(view)
        return False

    try:
        data = _dumps(source, is_small)
    except Exception as error:
        name, part = _culprit(source, "source")
        raise ArgumentError(
            f"{name}={_shown(part)} cannot be sent to worker processes: {type(error).__name__}: {error}; open it in "
            "__getitem__ at the first use, leave it out of __getstate__, or read with workers='threads'"
        ) from error
    descriptor = nameless_file()
    try:
        parts = [memoryview(data), *beside]
        table = np.array([len(parts), *(part.nbytes for part in parts)], np.int64)
        with open(descriptor, "wb", closefd=False) as file:
            for part in (table.data.cast("B"), *parts):
                file.write(part)
                file.write(bytes(-part.nbytes % ALIGNMENT))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def unpack(descriptor: int) -> Any:
    """Returns the source that was packed; its large arrays are mapped, each process seeing its own changes only."""
    whole = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    num_parts = int(np.frombuffer(whole, np.int64, 1)[0])
    table = np.frombuffer(whole, np.int64, 1 + num_parts)
    start, parts = aligned(table.nbytes), list[memoryview]()
    for num_bytes in table[1:].tolist():
        parts.append(whole[start : start + num_bytes])
        start += aligned(num_bytes)
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            mapped = _mapped_file(cast("NDArray[Any]", obj))
            return NotImplemented if mapped is None else (_map_again, mapped)
        if isinstance(obj, _LOCK):
            return threading.Lock, ()
        if isinstance(obj, _RLOCK):
            return threading.RLock, ()
        if isinstance(obj, threading.local):
            return type(obj), ()
        return super().reducer_override(obj)


def _dumps(source: Any, buffer_callback: Any = None) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=buffer_callback).dump(source)
        return file.getvalue()


def _mapped_file(array: NDArray[Any]) -> tuple[Any, ...] | None:
    """Returns what `_map_again` needs, if an array is a view of a file that NumPy mapped and that others see alike."""
    found: Any = array
    while isinstance(found, np.ndarray) and not (isinstance(found, np.memmap) and isinstance(found.base, mmap.mmap)):
        found = cast("NDArray[Any]", found).base
    if not isinstance(found, np.memmap) or array.dtype.hasobject:
        return None
    origin = cast("np.memmap[Any, Any]", found)
    if origin.filename is None or origin.mode == "c":  # without a name, or with changes that the file does not have
        return None
    path = str(Path(origin.filename).absolute())
    try:
        stamp = _stamp(path, written=origin.mode != "r")
    except FileNotFoundError:  # its bytes live for as long as they are mapped
        return None
    offset = origin.offset + array.ctypes.data - origin.ctypes.data
    return path, offset, array.dtype, array.shape, array.strides, stamp


def _map_again(
    path: str, offset: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], stamp: tuple[int, ...]
) -> NDArray[Any]:
    found = _stamp(path, written=stamp[-1] == 0)
    if found != stamp:
        raise FormatError(
            f"{path}: changed after it was opened: inode, bytes and time are {found}, expected {stamp}; open it again"
        )
    whole = np.memmap(path, np.uint8, "r")
    return np.ndarray(shape, dtype, whole.data, offset, strides)


def _stamp(path: str, *, written: bool) -> tuple[int, ...]:
    state = Path(path).stat()
    return state.st_ino, state.st_size, 0 if written else state.st_mtime_ns


def _culprit(value: Any, name: str) -> tuple[str, Any]:
    """Returns the innermost part of a value that cannot be pickled, and how to get to it."""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        for part_name, part in _parts(value):
            if not _is_picklable(part):
                name, value = f"{name}{part_name}", part
                break
    return name, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in cast("Mapping[Any, Any]", value).items())
    elif isinstance(value, list | tuple | set):
        yield from ((f"[{number}]", part) for number, part in enumerate(cast("list[Any]", value)))
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f".{name}", cell.cell_contents) for name, cell in cells)
        names = (name for name in value.__code__.co_names if name in value.__globals__)
        yield from ((f".{name}", value.__globals__[name]) for name in names)
    else:
        members = cast("Mapping[str, Any]", getattr(value, "__dict__", {}))
        yield from ((f".{name}", part) for name, part in members.items() if name not in ("__dict__", "__weakref__"))
        wrapped = ("func", "args", "keywords", "__self__", "__func__", "__class__")  # partial, methods, instances
        yield from ((f".{name}", getattr(value, name)) for name in wrapped if hasattr(value, name))


def _is_picklable(value: Any) -> bool:
    try:
        _dumps(value, lambda buffer: False)
    except Exception:  # noqa: BLE001 (whatever it is, the caller raises the first error)
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
