"""What runs in a worker process: it reads windows of its source into shared memory, until its parent is gone."""

import contextlib
import faulthandler
import functools
import os
import pickle
import socket
import traceback
from collections.abc import Callable

import jax
import numpy as np
from numpy.typing import NDArray

from braidax.data.source import Source, is_varying, read_samples, source_at
from braidax.data.workers.processes.memory import SharedMemory, window_bytes, window_leaves
from braidax.data.workers.processes.messages import channel_of, packed, receive, send
from braidax.data.workers.processes.pickling import unpack
from braidax.errors import ArgumentError, BraidaxError, RecordError
from braidax.lifeline import end_with
from braidax.spans import Trace

At = tuple[int | None, int] | None
"""Seed and epoch of a read, or None where nobody said."""

_MOST_SPANS = 64  # of one window: more is in totals alone
_EPOCHS_KEPT = 4  # reads of two epochs mix at the border between them


def main(requests: int, memory: int, parent: int, source: int) -> None:
    """Serves reads until the other end of the socket closes.

    **Arguments:** descriptors: `requests`, of the socket; `memory`, of what the windows are written to; `parent`, of a
    pipe whose other end the parent holds for as long as it lives; `source`, of the packed source.
    """
    for descriptor in (requests, memory, parent, source):
        os.set_inheritable(descriptor, False)
    faulthandler.enable()  # a crash in native code shows where
    end_with(parent)
    with contextlib.closing(channel_of(socket.socket(fileno=requests))) as channel:
        try:
            unpacked: Source = unpack(source)
        except BaseException as error:  # noqa: BLE001 (it is raised by the parent)
            send(channel, _raised(error, ArgumentError, "source cannot be unpacked in a worker process"))
            return
        os.close(source)
        serve = _Serve(unpacked, SharedMemory(memory))
        try:
            send(channel, packed(("ready",)))
            while True:
                send(channel, serve.answer(*receive(channel)))
        except ConnectionError:
            return


class _Serve:
    """Answers reads of a source."""

    def __init__(self, source: Source, memory: SharedMemory) -> None:
        self._source = source
        self._memory = memory
        self._source_at: Callable[[int | None, int], Source] = functools.lru_cache(_EPOCHS_KEPT)(
            functools.partial(source_at, source)
        )

    def answer(self, at: At, indices: NDArray[np.int64]) -> bytes:
        try:
            source = self._source if at is None else self._source_at(*at)
            specs, treedef = jax.tree.flatten(source.sample_spec)
            num_samples = len(indices)
            memory = self._memory.array(window_bytes(specs, num_samples))
            leaves = window_leaves(memory, specs, num_samples)
            trace = Trace(max_spans=_MOST_SPANS)
            with trace.active():
                read_samples(source, indices, treedef.unflatten(leaves))
            varying = [leaf for leaf, spec in zip(leaves, specs, strict=True) if is_varying(spec)]
            return packed(("done", (varying, (trace.spans, trace.totals()))))
        except BaseException as error:  # noqa: BLE001 (it is raised by the parent)
            listed = f"{indices[:8].tolist()}{'…' if len(indices) > 8 else ''}"
            return _raised(error, RecordError, f"source cannot read the records {listed} in a worker process")


def _raised(error: BaseException, other: type[BraidaxError], what: str) -> bytes:
    """Returns the message of an error, its cause and its traceback; what is no error of braidax becomes the `other`."""
    text = "".join(traceback.format_exception(error))
    cause = error.__cause__
    if not isinstance(error, BraidaxError):
        error, cause = other(f"{what}: {type(error).__name__}: {error}; the note below says where"), error
    nearest = next(kind for kind in type(error).__mro__ if kind.__module__ == BraidaxError.__module__)
    return packed(
        ("raised", _told(error) or pickle.dumps(nearest(str(error))), _told(cause) or pickle.dumps(None), text)
    )


def _told(error: BaseException | None) -> bytes | None:
    """Returns an error pickled, or None if it cannot be: a user's own kind may fail in any way."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 (in any way)
        return None
    return data
