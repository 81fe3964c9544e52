"""How arrays get from a stage to one of another number of devices: in pieces, which each device puts in one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from .route import Ends, joined, shard_on
from .sockets import Sockets

Box = tuple[tuple[int, int], ...]
"""The part of an array that a device has: where it begins and ends along each dim."""


class Piece(NamedTuple):
    """What one device sends to another: of an array, by number, a box of that, which in its own shard is `within`."""

    array: int
    source: Any
    to: Any
    box: Box
    within: Box
    is_shard: bool

    def spec(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns that of what comes."""
        return jax.ShapeDtypeStruct(
            tuple(end - begin for begin, end in self.box), dtype, sharding=SingleDeviceSharding(self.to)
        )


@final
class Relay:
    """The way of some arrays between stages that divide samples among different numbers of devices.

    A device sends of its shard what another one wants of it; where several have that, one of the same process does.
    Nothing goes by way of the host, and nothing waits. Its methods are those of `Way`; all processes of either stage
    send, and then receive, in one order for each two of them.

    **Arguments:** `to`: where the arrays come to. `specs`: of these. `lie`: how they do at the other stage,
    `shardings`: how here. `channel`: as of `Route`.
    """

    def __init__(
        self,
        to: Ends,
        specs: Sequence[Any],
        lie: Sequence[Sharding],
        shardings: Sequence[Sharding],
        sockets: Sockets | None,
        channel: int = 0,
    ) -> None:
        self._channel = channel
        self._specs, self._shardings, self._sockets = specs, tuple(shardings), sockets
        self._is_one, own = to.mesh.size == 1, jax.process_index()
        pieces = self._pieces = [
            one
            for device in to.mesh.devices.flat
            for at in range(len(specs))
            for one in _pieces(at, specs[at].shape, lie[at], shardings[at], device)
        ]
        ends = [(one.source.process_index, one.to.process_index) for one in pieces]
        self._within = _grouped([one.to for one in pieces], [at for at, one in enumerate(ends) if one == (own, own)])
        outward = [at for at, (source, other) in enumerate(ends) if source == own != other]
        inward = [at for at, (source, other) in enumerate(ends) if source != own == other]
        self._outward = _grouped([other for _, other in ends], outward)
        self._inward = _grouped([source for source, _ in ends], inward)
        sent = [at for at, (source, _) in enumerate(ends) if source == own]
        self._cut = [_cutter(pieces, own) for own in _grouped([one.source for one in pieces], sent).values()]
        got = [at for at, (_, other) in enumerate(ends) if other == own]
        self._join = [_joiner(pieces, own) for own in _grouped([one.to for one in pieces], got).values()]
        self._kept: list[dict[int, Any]] = []

    @property
    def sends(self) -> bool:
        """As of `Way`."""
        return bool(self._outward)

    @property
    def receives(self) -> bool:
        """As of `Way`."""
        return bool(self._inward)

    def send(self, arrays: Sequence[Any]) -> tuple[Any, ...] | None:
        """As of `Way`."""
        if not self._specs:
            return ()
        found, moved = dict[int, Any](), dict[int, Any]()
        for cut in self._cut:
            found.update(cut(arrays))
        for process, own in self._outward.items():
            assert self._sockets is not None, "there are other processes"
            self._sockets.send(process, [found[at] for at in own], self._channel)
        for device, own in self._within.items():
            moved.update(zip(own, jax.device_put([found[at] for at in own], device), strict=True))
        if self._inward:
            self._kept.append(moved)
            return None
        return self._joined(moved) if moved else None

    def receive(self) -> tuple[Any, ...]:
        """As of `Way`."""
        if not self._specs:
            return ()
        found = self._kept.pop(0) if self._kept else {}
        for process, own in self._inward.items():
            assert self._sockets is not None, "there are other processes"
            wanted = [self._pieces[at].spec(self._specs[self._pieces[at].array].dtype) for at in own]
            found.update(zip(own, self._sockets.receive(process, wanted, self._channel), strict=True))
        return self._joined(found)

    def _joined(self, found: dict[int, Any]) -> tuple[Any, ...]:
        return joined(self._specs, self._shardings, [join(found) for join in self._join], is_one=self._is_one)


def _pieces(array: int, shape: Sequence[int], lie: Sharding, on: Sharding, device: Any) -> list[Piece]:
    """Returns of what pieces a device puts its shard in one, in the order in which it does."""
    holders: dict[Box, list[Any]] = {}
    for other, index in lie.devices_indices_map(tuple(shape)).items():
        holders.setdefault(_box(index, shape), []).append(other)
    wanted = _box(on.devices_indices_map(tuple(shape))[device], shape)
    found: list[Piece] = []
    for held, devices in sorted(holders.items()):
        box = tuple((max(one[0], other[0]), min(one[1], other[1])) for one, other in zip(held, wanted, strict=True))
        if any(end <= begin for begin, end in box) and box != wanted:
            continue
        nearest = [one for one in devices if one.process_index == device.process_index] or devices
        source = nearest[device.id % len(nearest)]
        within = tuple((begin - old, end - old) for (begin, end), (old, _) in zip(box, held, strict=True))
        found.append(Piece(array, source, device, box, within, box == held))
        if box == wanted:
            return found[-1:]
    return found


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _grouped(keys: Sequence[Any], numbers: Sequence[int]) -> dict[Any, list[int]]:
    """Returns numbers by their key."""
    found: dict[Any, list[int]] = {}
    for at in numbers:
        found.setdefault(keys[at], []).append(at)
    return found


def _cutter(pieces: Sequence[Piece], own: Sequence[int]) -> Callable[[Sequence[Any]], dict[int, Any]]:
    """Returns what takes pieces from the shards of a device, all in one program; a whole shard stays what it is."""
    device = pieces[own[0]].source
    whole, cut = ([at for at in own if pieces[at].is_shard is is_shard] for is_shard in (True, False))
    arrays = sorted({pieces[at].array for at in cut})
    boxes = [(arrays.index(pieces[at].array), pieces[at].within) for at in cut]
    run = jax.jit(lambda shards: [_slice(shards[at], box) for at, box in boxes])

    def pieces_of(given: Sequence[Any]) -> dict[int, Any]:
        found = {at: shard_on(given[pieces[at].array], device) for at in whole}
        if cut:
            found.update(zip(cut, run([shard_on(given[at], device) for at in arrays]), strict=True))
        return found

    return pieces_of


def _joiner(pieces: Sequence[Piece], own: Sequence[int]) -> Callable[[dict[int, Any]], list[Any]]:
    """Returns what puts the pieces of each array in one, in one program; a single one stays what it is."""
    arrays = [*_grouped([one.array for one in pieces], own).values()]
    several = [numbers for numbers in arrays if len(numbers) > 1]
    dims = [_dim_of([pieces[at].box for at in numbers]) for numbers in several]
    run = jax.jit(lambda given: [jnp.concatenate(one, dim) for one, dim in zip(given, dims, strict=True)])

    def shards_of(found: dict[int, Any]) -> list[Any]:
        joined = iter(run([[found[at] for at in numbers] for numbers in several]) if several else ())
        return [found[numbers[0]] if len(numbers) == 1 else next(joined) for numbers in arrays]

    return shards_of


def _slice(shard: Any, box: Box) -> Any:
    return jax.lax.slice(shard, [begin for begin, _ in box], [end for _, end in box])


def _dim_of(boxes: Sequence[Box]) -> int:
    """Returns along which dim boxes stand one behind the other."""
    (dim,) = (at for at, ends in enumerate(zip(*boxes, strict=True)) if len({*ends}) > 1)
    return dim
