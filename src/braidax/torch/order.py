"""Which items make up the batches of an epoch: our own order, shared out among ranks, or a sampler's."""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from braidax.data.sampling.permutation import Permutation
from braidax.errors import ArgumentError
from braidax.torch.library import agreed_seed, rank_and_size

State = dict[str, Any]

_WINDOW = 1 << 12  # indices permuted at a time


@runtime_checkable
class Order(Protocol):
    """The batches of every epoch, and what has to be remembered to go on within one.

    A state is a dict of plain values. `epoch` is that of the next pass.
    """

    epoch: int

    def state(self) -> State:
        """Returns the state where the next pass begins, as far as it is known before that."""
        ...

    def start(self) -> State:
        """Returns the state where a pass begins, and moves on to the next epoch."""
        ...

    def restore(self, state: State) -> None:
        """Lets the next pass begin at a state. **Raises:** `ArgumentError` if it is none of this order's."""
        ...

    def batches(self, state: State) -> Iterator[tuple[Any, State]]:
        """Yields the indices of the batches from a state on, each with the state behind it."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes next; one that was restored goes on where it was, any other begins at its start."""
        ...


class RankSampler(Order):
    """The indices that this rank loads: its part of one permutation, or of the data set's own order.

    Batch `k` of all ranks together is the `k`-th stretch of `batch_size * num_ranks` samples of that order, whatever
    the number of ranks. Where the last samples do not make a full one, they are shared out evenly, some of the epoch's
    first ones being repeated if they do not come out even; or they are left out.

    **Arguments:** `dataset`: has a length. `batch_size`: samples in a rank's batch; None for single samples. `shuffle`:
    whether the order is a permutation. `drop_last`: whether a last, smaller batch is left out. `generator`:
    torch's, for the seed.
    """

    def __init__(self, dataset: Any, batch_size: int | None, *, shuffle: bool, drop_last: bool, generator: Any) -> None:
        self.dataset = dataset
        self.epoch = 0
        self._batch_size = batch_size or 1
        self._single = batch_size is None
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._generator = generator
        self._seed: int | None = None
        self._restored: State | None = None

    def __iter__(self) -> Iterator[int]:
        for indices, _ in self.batches(self.start()):
            yield from [indices] if self._single else indices

    def __len__(self) -> int:
        """The number of indices that this rank gets in an epoch."""
        num_ranks = rank_and_size()[1]
        full, rest = divmod(len(self.dataset), self._batch_size * num_ranks)
        return full * self._batch_size + (0 if self._drop_last else -(-rest // num_ranks))

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch, the same for every rank."""
        full, rest = divmod(len(self.dataset), self._batch_size * rank_and_size()[1])
        return full + (rest > 0 and not self._drop_last)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state(self) -> State:
        if self._restored is not None and self._restored["epoch"] == self.epoch:
            return self._restored
        sizes = {"shuffle": self._shuffle, "num_samples": len(self.dataset)}
        return {"epoch": self.epoch, "position": 0, "seed": self._seed, **sizes}

    def start(self) -> State:
        if self._shuffle and self._seed is None:
            self._seed = agreed_seed(self._generator)
        state = {**self.state(), "seed": self._seed}
        self.epoch, self._restored = self.epoch + 1, None
        return state

    def restore(self, state: State) -> None:
        expected = self.state()
        for key, why in (("shuffle", "with the same shuffle"), ("num_samples", "over the same data set")):
            if state[key] != expected[key]:
                raise ArgumentError(
                    f"state_dict says {key}: {state[key]!r}, but this loader over "
                    f"dataset={type(self.dataset).__name__} has {expected[key]!r}; load it into a loader {why}"
                )
        self._seed, self.epoch, self._restored = state["seed"], state["epoch"], state

    def batches(self, state: State) -> Iterator[tuple[Any, State]]:
        num_samples, size, position = state["num_samples"], self._batch_size, state["position"]
        rank, num_ranks = rank_and_size()
        permutation = Permutation(num_samples, seed=state["seed"], epoch=state["epoch"])
        stretch = size * num_ranks
        while (left := num_samples - position) >= stretch:
            count = min(max(1, _WINDOW // size), left // stretch)
            starts = position + rank * size + stretch * np.arange(count, dtype=np.int64)
            for indices in permutation((starts[:, None] + np.arange(size)).ravel()).reshape(count, size).tolist():
                position += stretch
                yield indices[0] if self._single else indices, {**state, "position": position}
        if left and not self._drop_last:
            share = -(-left // num_ranks)
            positions = (position + rank * share + np.arange(share, dtype=np.int64)) % num_samples
            indices = permutation(positions).tolist()
            yield indices[0] if self._single else indices, {**state, "position": num_samples}


class SampledOrder(Order):
    """The batches that a user's sampler gives.

    A state counts batches and holds a checksum of their indices: after a restart the sampler has to give the same ones
    again, and is skipped forward. What the sampler keeps at the start of an epoch (its epoch, its generator, or what
    its own `state_dict` says) is put back first.

    **Arguments:** `sampler`: yields the indices of batches. `inner`: what `sampler` itself draws from, if known.
    """

    def __init__(self, sampler: Iterable[Any], inner: Any = None) -> None:
        self.epoch = 0
        self._sampler = sampler
        self._parts: list[Any] = [sampler] if inner is None else [sampler, inner]
        self._restored: State | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        for part in self._parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def state(self) -> State:
        if self._restored is not None and self._restored["epoch"] == self.epoch:
            return self._restored
        return {"epoch": self.epoch, "batches": 0, "checksum": 0, "samplers": [_kept(part) for part in self._parts]}

    def start(self) -> State:
        state = self.state()
        self.epoch, self._restored = self.epoch + 1, None
        return state

    def restore(self, state: State) -> None:
        for part, kept in zip(self._parts, state["samplers"], strict=True):
            _put_back(part, kept)
        self.epoch, self._restored = state["epoch"], state

    def batches(self, state: State) -> Iterator[tuple[Any, State]]:
        count, checksum = 0, 0
        for indices in self._sampler:
            count, checksum = count + 1, zlib.crc32(repr(indices).encode(), checksum)
            if count == state["batches"] and checksum != state["checksum"]:
                raise _unlike(self._sampler)
            if count > state["batches"]:
                yield indices, {**state, "batches": count, "checksum": checksum}
        if count < state["batches"]:
            raise _unlike(self._sampler)


class Stream(Order):
    """The batches of a data set that cannot be indexed, which are only counted.

    **Arguments:** `dataset`: told the epoch if it has `set_epoch`.
    """

    def __init__(self, dataset: Any) -> None:
        self.epoch = 0
        self._dataset = dataset
        self._restored: State | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def state(self) -> State:
        if self._restored is not None and self._restored["epoch"] == self.epoch:
            return self._restored
        return {"epoch": self.epoch, "batches": 0}

    def start(self) -> State:
        state = self.state()
        self.epoch, self._restored = self.epoch + 1, None
        return state

    def restore(self, state: State) -> None:
        self.set_epoch(state["epoch"])
        self._restored = state

    def batches(self, state: State) -> Iterator[tuple[Any, State]]:
        raise TypeError(f"{type(self._dataset).__name__} has no indices")


def _unlike(sampler: Any) -> ArgumentError:
    return ArgumentError(
        f"sampler={type(sampler).__name__} does not give the indices again that it gave before state_dict was saved, "
        f"so that samples would be lost or repeated; give it a generator=torch.Generator() or a state_dict of its own, "
        f"or use shuffle=True, which can be resumed"
    )


def _kept(part: Any) -> State:
    if hasattr(part, "state_dict"):
        return {"state": part.state_dict()}
    kept: State = {}
    if isinstance(getattr(part, "epoch", None), int) and hasattr(part, "set_epoch"):
        kept["epoch"] = part.epoch
    if hasattr(getattr(part, "generator", None), "get_state"):
        kept["generator"] = part.generator.get_state()
    return kept


def _put_back(part: Any, kept: Mapping[str, Any]) -> None:
    if "state" in kept:
        part.load_state_dict(kept["state"])
    if "epoch" in kept:
        part.set_epoch(kept["epoch"])
    if "generator" in kept:
        part.generator.set_state(kept["generator"])
