"""How arrays get from the devices of one stage to those of another."""

from collections.abc import Sequence
from typing import Any, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from .absent import absent
from .sockets import Sockets


@runtime_checkable
class Ends(Protocol):
    """Where a route begins or ends: devices of a stage."""

    @property
    def mesh(self) -> Mesh:
        """These devices."""
        ...

    @property
    def is_here(self) -> bool:
        """Whether this process has some of them."""
        ...


@runtime_checkable
class Way(Protocol):
    """How arrays get from one stage to another."""

    @property
    def sends(self) -> bool:
        """Whether anything goes to other processes."""
        ...

    @property
    def receives(self) -> bool:
        """Whether anything comes from other processes."""
        ...

    def send(self, arrays: Sequence[Any]) -> tuple[Any, ...] | None:
        """Sends arrays, which nobody may give up before they are received.

        **Returns:** them at the other stage, if all comes from this process; else None.
        """
        ...

    def receive(self) -> tuple[Any, ...]:
        """Returns arrays at the other stage, of which this process is one: what was sent first and not yet received."""
        ...


@final
class Route:
    """The way of some arrays from stage to stage, each shard from a device to the one at its place there.

    All processes of either stage send, and then receive, in one order for each two of them.

    **Arguments:** `source`, `to`: with as many devices. `specs`: of the arrays. `shardings`: that they have at `to`,
    and alike at `source`. `channel`: of the sockets, on which nothing is sent or received in another order.
    """

    def __init__(
        self,
        source: Ends,
        to: Ends,
        specs: Sequence[Any],
        shardings: Sequence[Sharding],
        sockets: Sockets | None,
        channel: int = 0,
    ) -> None:
        self._channel = channel
        self._specs, self._shardings, self._to, self._sockets = specs, tuple(shardings), to, sockets
        own = jax.process_index()
        pairs = list(zip(source.mesh.devices.flat, to.mesh.devices.flat, strict=True))
        self._within = [(one, other) for one, other in pairs if one.process_index == other.process_index == own]
        self._is_within = len(self._within) == len(pairs)
        self._device = pairs[0][1] if len(pairs) == 1 else None
        self._outward: dict[int, list[Any]] = {}
        self._inward: dict[int, list[Any]] = {}
        for one, other in pairs:
            if one.process_index != other.process_index:
                if one.process_index == own:
                    self._outward.setdefault(other.process_index, []).append(one)
                if other.process_index == own:
                    self._inward.setdefault(one.process_index, []).append(other)
        shapes = [on.shard_shape(spec.shape) for spec, on in zip(specs, shardings, strict=True)]
        self._wanted = {
            process: [
                jax.ShapeDtypeStruct(shape, spec.dtype, sharding=SingleDeviceSharding(device))
                for device in devices
                for shape, spec in zip(shapes, specs, strict=True)
            ]
            for process, devices in self._inward.items()
        }
        self._kept: list[dict[Any, list[Any]]] = []

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
        if not arrays:
            return ()
        if self._is_within:
            on = self._shardings if self._device is None else self._device
            return jax.device_put(tuple(arrays), on)
        for process, devices in self._outward.items():
            assert self._sockets is not None, "there are other processes"
            shards = [shard_on(one, device) for device in devices for one in arrays]
            self._sockets.send(process, shards, self._channel)
        within = {
            other: jax.device_put([shard_on(array, one) for array in arrays], other) for one, other in self._within
        }
        if self._inward:
            self._kept.append(within)
            return None
        return self._joined(within) if within else None

    def receive(self) -> tuple[Any, ...]:
        """As of `Way`."""
        if not self._specs:
            return ()
        found = self._kept.pop(0) if self._kept else {}
        for process, devices in self._inward.items():
            assert self._sockets is not None, "there are other processes"
            arrays, count = self._sockets.receive(process, self._wanted[process], self._channel), len(self._specs)
            for at, device in enumerate(devices):
                found[device] = arrays[at * count : (at + 1) * count]
        return self._joined(found)

    def _joined(self, found: dict[Any, list[Any]]) -> tuple[Any, ...]:
        return joined(self._specs, self._shardings, [*found.values()], is_one=self._device is not None)


def move(way: Way, arrays: Sequence[Any], shardings: Sequence[Sharding]) -> tuple[Any, ...]:
    """Sends and receives at once, whatever is done with the arrays afterwards.

    **Arguments:** `shardings`: at the other stage.

    **Returns:** what is there, absent where this process has none.
    """
    found = way.send([jnp.copy(one) for one in arrays] if way.sends else arrays)
    if found is None and way.receives:
        found = way.receive()
    if found is None:
        found = tuple(absent(one, on) for one, on in zip(arrays, shardings, strict=True))
    return found


def joined(
    specs: Sequence[Any], shardings: Sequence[Sharding], shards: Sequence[Sequence[Any]], *, is_one: bool
) -> tuple[Any, ...]:
    """Returns arrays of their shards. **Arguments:** `shards`: of each device. `is_one`: whether there is one only."""
    if is_one:
        return tuple(shards[0])
    return tuple(
        jax.make_array_from_single_device_arrays(spec.shape, on, [own[at] for own in shards])
        for at, (spec, on) in enumerate(zip(specs, shardings, strict=True))
    )


def shard_on(array: Any, device: Any) -> Any:
    """Returns the part of an array on a device of this process."""
    if isinstance(array.sharding, SingleDeviceSharding):
        return array
    shards = array.addressable_shards
    if len(shards) == 1:
        return shards[0].data
    return next(one.data for one in shards if one.device == device)
