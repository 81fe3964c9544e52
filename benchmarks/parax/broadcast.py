"""The baseline: one process loads everything and sends it to all, through Ray's object store or through JAX."""

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.clusters import ray_cluster
from benchmarks.parax.cases import NUM_PROCESSES, Case
from benchmarks.parax.counting import Counted, Tally
from benchmarks.parax.system import PREFETCH, Arrays, HostBatch, Reader, drawn, loaded_ahead, numbers, placed

NAMESPACE, ACTOR = "parax", "loader"


class _Cutting:
    """Makes global arrays of whole batches, which every process has."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._source = case.source()
        self.shardings = case.shardings()
        self.received_bytes = 0

    def _arrays(self, batch: Mapping[str, NDArray[Any]]) -> Arrays:
        return {
            name: placed(batch[name] if sharding.addressable_devices else None, 0, *self._like(name), sharding)
            for name, sharding in self.shardings.items()
        }

    def _like(self, name: str) -> tuple[tuple[int, ...], Any]:
        leaf = self._source.sample_spec[name]
        return (self._case.batch_size, *leaf.shape), leaf.dtype


@final
class ThroughJax(_Cutting):
    """Process 0 loads, its threads ahead; `broadcast_one_to_all`; every process cuts its shards.

    **Arguments:** `threads`: of process 0; None for as many as each process has in other systems.
    """

    def __init__(self, case: Case, threads: int | None = None) -> None:
        super().__init__(case)
        self._num_threads = threads or case.threads

    @property
    def tally(self) -> Tally:
        """What this process has read so far."""
        return self._source.tally

    def batches(self, epochs: int | None) -> Generator[Arrays]:
        """As `System.batches`, globally shuffled."""
        from jax.experimental.multihost_utils import broadcast_one_to_all

        for batch in self._loaded(epochs):
            whole: Any = broadcast_one_to_all(batch)
            yield self._arrays(whole)

    def _loaded(self, epochs: int | None) -> Generator[HostBatch]:
        coming = numbers(self._case, epochs)
        if jax.process_index():
            nothing = {name: np.zeros(*self._like(name)) for name in self.shardings}
            yield from (nothing for _ in coming)
            return
        reader = Reader(self._source, list(self.shardings), self._num_threads)
        with contextlib.closing(reader):
            yield from loaded_ahead(lambda number: reader.begin(_records(number, self._case, self._source)), coming)


@final
class ThroughRay(_Cutting):
    """An actor loads, its thread ahead, and puts each batch into the object store once; every process gets it whole.

    **Arguments:** `threads`: of the actor; None for as many as each process has in other systems.
    """

    def __init__(self, case: Case, threads: int | None = None) -> None:
        import ray

        super().__init__(case)
        self._asked_for = replace(case, threads=threads or case.threads)
        self._actor: Any = ray.get_actor(ACTOR, namespace=NAMESPACE)
        self._get: Callable[[Any], Any] = ray.get
        self._tickets = itertools.count()

    @property
    def tally(self) -> Tally:
        """What the actor has read so far, told by process 0."""
        return Tally(0, 0) if jax.process_index() else Tally(*self._get(self._actor.tally.remote(self._asked_for)))

    def batches(self, epochs: int | None) -> Generator[Arrays]:
        """As `System.batches`, globally shuffled."""
        for held in loaded_ahead(self._ask, numbers(self._case, epochs)):
            batch: Mapping[str, NDArray[Any]] = self._get(held[0])
            self.received_bytes += sum(leaf.nbytes for leaf in batch.values())
            yield self._arrays(batch)

    def _ask(self, number: int) -> Callable[[], Any]:
        reply = self._actor.batch.remote(self._asked_for, next(self._tickets), number)
        return lambda: self._get(reply)


class LoaderActor:
    """Loads for all. Its threads are those of the case; others only put batches into the store, and answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[Case, tuple[Counted, Reader]] = {}
        self._held: dict[tuple[Case, int], tuple[Future[Any], int]] = {}
        self._putting = ThreadPoolExecutor(1)

    def batch(self, case: Case, ticket: int, number: int) -> list[Any]:
        """Returns the reference of a batch, as a list, lest Ray fetches it: the same one for all that ask.

        **Arguments:** `ticket`: the how-manieth of this case that the process asks for. `number`: of the batch.
        """
        with self._lock:
            found, num_asked = self._held.pop((case, ticket), None) or (self._begin(case, number), 0)
            if num_asked + 1 < NUM_PROCESSES:
                self._held[case, ticket] = found, num_asked + 1
        return [found.result()]

    def tally(self, case: Case) -> tuple[int, int]:
        """Returns what was read for a case, all that was asked for included."""
        self._putting.submit(int).result()
        with self._lock:
            return self._reader(case)[0].tally

    def _begin(self, case: Case, number: int) -> Future[Any]:
        import ray

        source, reader = self._reader(case)
        wait = reader.begin(_records(number, case, source))
        return self._putting.submit(lambda: ray.put(wait()))

    def _reader(self, case: Case) -> tuple[Counted, Reader]:
        if case not in self._readers:
            source = case.source()
            self._readers[case] = source, Reader(source, sorted(source.sample_spec), case.threads)
        return self._readers[case]


class Cluster:
    """A Ray of this machine. **Arguments:** `address`; `daemons`: the processes, of psutil, that it consists of."""

    def __init__(self, address: str, daemons: Sequence[Any]) -> None:
        self.address = address
        self._daemons = daemons

    @contextlib.contextmanager
    def resting(self) -> Generator[None]:
        """Stops its processes meanwhile: who has not the turn takes no time from who has."""
        stopped = [child for daemon in self._daemons for child in (daemon, *daemon.children(recursive=True))]
        try:
            for process in stopped:
                process.suspend()
            yield
        finally:
            for process in stopped:
                process.resume()


@contextlib.contextmanager
def ray_actor() -> Generator[Cluster]:
    """A Ray of this machine, with the actor."""
    import psutil

    before = set(psutil.Process().children())
    with ray_cluster(1, store_bytes=1 << 30) as ray:
        options = {"name": ACTOR, "namespace": NAMESPACE, "max_concurrency": NUM_PROCESSES * (PREFETCH + 2)}
        actor = ray.remote(LoaderActor).options(**options).remote()
        ray.get(actor.__ray_ready__.remote())
        daemons = [child for child in psutil.Process().children() if child not in before]
        yield Cluster(ray.get_runtime_context().gcs_address, daemons)


def join_ray(address: str) -> None:
    """Lets this process use the actor."""
    import ray

    ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)


def _records(number: int, case: Case, source: Counted) -> NDArray[np.int64]:
    return drawn(number, len(source), case.batch_size, "shuffled")
