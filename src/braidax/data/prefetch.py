"""The last mile for foreign iterators: their batches as global arrays, sent to the devices ahead of the step."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from braidax.data.fetching.slots import Slots
from braidax.data.sharding.load_plan import LoadPlan, plan_load
from braidax.data.source import loader_dtype, narrow
from braidax.data.workers.threads import Threads, result_within
from braidax.errors import ArgumentError, RecordError, WaitTimeout

_END = object()
_MAX_PLANS = 8  # shapes whose plan and slots are kept; batches of ever new lengths must not pile up memory


def prefetch_to_device(
    batches: Iterable[Any],
    mesh: Mesh | None,
    specs: Any,
    *,
    prefetch: int = 2,
    timeout_seconds: float = 300.0,
) -> Iterator[Any]:
    """Yields the batches of any iterable as global `jax.Array`s, a few of them sent ahead.

    **Arguments:** `batches`: yields PyTrees of arrays `[batch, ...]` (NumPy, torch on CPU, TensorFlow: whatever
    `numpy.asarray` takes), such as a Grain, torch or tf.data loader; drawn from by one thread of ours. Each batch is
    copied once, so the iterator may reuse its buffers. `mesh`, `specs`: as for `DataLoader`. `prefetch`: batches in
    flight ahead of the one in use. `timeout_seconds`: the longest wait for one batch.

    **Raises:** `SpecError` or `ArgumentError` at the first batch that does not fit, and whatever the iterable raises,
    at that batch; `WaitTimeout`.
    """
    if prefetch < 1:
        raise ArgumentError(f"prefetch={prefetch!r} is not a positive integer")
    return _stream(iter(batches), mesh, specs, prefetch, timeout_seconds)


def _stream(
    iterator: Iterator[Any], mesh: Mesh | None, specs: Any, prefetch: int, timeout_seconds: float
) -> Iterator[Any]:
    thread = Threads(1, "braidax-prefetch")
    sender = _Sender(iterator, mesh, specs, prefetch)
    coming: deque[Future[Any]] = deque()
    try:
        while True:
            while len(coming) <= prefetch:
                coming.append(thread.submit(sender.next_batch))
            batch = result_within(
                coming.popleft(), timeout_seconds=timeout_seconds, what="the next batch of the iterator"
            )
            if batch is _END:
                return
            yield batch
    except WaitTimeout:
        thread.abandon()
        raise
    finally:
        thread.close(timeout_seconds=timeout_seconds)


class _Sender:
    """Draws batches on the pool's one thread; plans once per shape."""

    def __init__(self, iterator: Iterator[Any], mesh: Mesh | None, specs: Any, prefetch: int) -> None:
        self._iterator = iterator
        self._mesh = mesh
        self._specs = specs
        self._keep = prefetch + 2
        self._plans: dict[Any, tuple[LoadPlan, Slots]] = {}

    def next_batch(self) -> Any:
        batch = next(self._iterator, _END)
        if batch is _END:
            return _END
        leaves, structure = jax.tree.flatten(jax.tree.map(_as_array, batch))
        lengths = [len(leaf) for leaf in leaves]
        if len(set(lengths)) > 1:
            raise RecordError(
                f"a batch of the iterator has leaves with {lengths} samples; expected the same number in every leaf: "
                f"mend the iterator"
            )
        key = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._plans:
            if len(self._plans) == _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            spec = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves])
            plan = plan_load(spec, self._mesh, self._specs)
            self._plans[key] = (plan, Slots(plan.num_bytes, keep=self._keep))
        plan, slots = self._plans[key]
        memory = slots.take()
        for leaf_plan, leaf in zip(plan.leaves, leaves, strict=True):
            leaf_plan.fill(memory, leaf)
        return plan.batch(plan.arrays(memory))


def _as_array(leaf: Any) -> NDArray[Any]:
    array = np.asarray(leaf)
    if array.ndim == 0:
        raise RecordError(
            f"a batch of the iterator holds {type(leaf).__name__} with dtype={array.dtype}, shape={array.shape}; "
            f"expected numeric arrays with a leading batch dim"
        )
    dtype = loader_dtype(array.dtype, where="a batch of the iterator", leaf=type(leaf).__name__)
    if dtype == array.dtype:
        return array
    out = np.empty(array.shape, dtype)
    narrow(array, out, np.arange(len(array)), where="a batch of the iterator", leaf=type(leaf).__name__)
    return out
