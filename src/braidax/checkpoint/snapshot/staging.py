"""Parts of device arrays, kept from changing until they are copied to host memory of our own.

No device's memory but a CPU's can be read in place. From others a transfer to pinned host memory is begun, which the
runtime orders before any later donation. XLA keeps pinned memory for good and allows a GPU's process 64 GiB of it
(`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`), hence no more than half of that is asked for at once.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.errors import JaxRuntimeError

_MAX_PINNED_BYTES = 32 << 30
_TRANSFER_BYTES = 1 << 30  # of arrays that are handed to the runtime in one call

_logger = logging.getLogger(__name__)

# JAX leaves some of itself unannotated.
_jax: Any = jax


class Cut(NamedTuple):
    """A part of an array that is to be copied.

    **Fields:** `destination`: where to, of the part's shape and dtype. `array`: on one device. `place`: of the part in
    it, None for all.
    """

    destination: np.ndarray
    array: jax.Array
    place: tuple[slice, ...] | None


class Copy(NamedTuple):
    """What has yet to be copied. **Fields:** `destination`: where to. `source`: what no donation changes any more."""

    destination: np.ndarray
    source: Any


def stage(cuts: Sequence[Cut]) -> deque[Copy]:
    """Keeps parts of arrays from changing; to be called before any of the arrays can be donated.

    What is on a CPU device is waited for. What lies in host memory already is copied at once, and so is the first of
    what is on other devices, where it is more than 32 GiB, and what there is no pinned memory for, which
    the log then says.

    **Returns:** what is still to be copied, by `copy`, on any thread, and then let go of.
    """
    kept: deque[Copy] = deque()
    far: list[Cut] = []
    for cut in cuts:
        if _is_read_in_place(cut.array):
            # This view makes XLA copy instead of donate.
            kept.append(Copy(cut.destination, np.asarray(cut.array)[... if cut.place is None else (*cut.place, ...)]))
        elif cut.array.sharding.memory_kind != _device_of(cut.array).default_memory().kind:
            copy(Copy(cut.destination, _part(cut)))
        else:
            far.append(cut)
    pinned: deque[Copy] = deque()
    num_pinned_bytes = 0
    for group in _transfers(far):
        num_bytes = sum(cut.destination.nbytes for cut in group)
        while pinned and num_pinned_bytes + num_bytes > _MAX_PINNED_BYTES:
            num_pinned_bytes -= pinned[0].destination.nbytes
            copy(pinned.popleft())
        try:
            sources = _pinned(group)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _logger.warning("the loop waits for a copy of %d bytes to the host: %s", num_bytes, error)
            for cut in group:
                copy(Copy(cut.destination, _part(cut)))
        else:
            pinned += [Copy(cut.destination, source) for cut, source in zip(group, sources, strict=True)]
            num_pinned_bytes += num_bytes
    return kept + pinned


def copy(part: Copy) -> None:
    """Copies a part to where it belongs."""
    np.copyto(_plain(part.destination), _plain(np.asarray(part.source)))


def is_out_of_memory(error: Exception) -> bool:
    """Says whether JAX could not allocate: it raises either type, by whether it has called the program before."""
    return isinstance(error, JaxRuntimeError | ValueError) and str(error).startswith("RESOURCE_EXHAUSTED")


def prepared(tree: Any, prepare: Callable[[Any], Any] | None) -> Any:
    """Returns what `prepare` makes of a tree; where a device has no memory for that, the tree, and says so in the log.

    The snapshot is the same either way: the step that donates the tree waits for it, or leaves its memory alone.
    """
    if prepare is None:
        return tree
    try:
        return prepare(tree)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _logger.warning("a checkpoint is taken of the state itself, as there is no memory for prepare=: %s", error)
        return tree


def _transfers(cuts: Sequence[Cut]) -> Iterator[list[Cut]]:
    group: list[Cut] = []
    num_bytes = 0
    for cut in cuts:
        if group and num_bytes + cut.destination.nbytes > _TRANSFER_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(cut)
        num_bytes += cut.destination.nbytes
    if group:
        yield group


def _pinned(cuts: Sequence[Cut]) -> list[jax.Array]:
    """Returns copies in pinned host memory, which nobody has waited for."""
    targets = [jax.sharding.SingleDeviceSharding(_device_of(cut.array), memory_kind="pinned_host") for cut in cuts]
    return _jax.device_put([_part(cut) for cut in cuts], targets)


def _part(cut: Cut) -> jax.Array:
    """Returns a part of an array on its device, where no mesh has a say."""
    if cut.place is None:
        return cut.array
    with _jax.set_mesh(None):
        return cut.array[cut.place]


def _is_read_in_place(array: jax.Array) -> bool:
    return _device_of(array).platform == "cpu"


def _device_of(array: jax.Array) -> Any:
    (device,) = array.devices()
    return device


def _plain(array: np.ndarray) -> np.ndarray:
    # NumPy copies its own dtypes without the GIL; those of ml_dtypes are foreign to it, and integers of their size do.
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.itemsize in (1, 2, 4, 8) else array
