"""Where a stage lies, and how its programs are compiled for that."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from braidax.parallel.given.arrays import place
from braidax.parallel.plan.batch import along_batch
from braidax.parallel.plan.layout import Layout
from braidax.parallel.stages.products import AS_IS
from braidax.program import automatic, compile_on

from .sending.absent import AbsentProgram, absent
from .sending.relay import Relay
from .sending.route import Route, Way, move
from .sending.sockets import Sockets


@final
class Home:
    """Devices of a stage, among which the samples of a microbatch are divided.

    On a single device programs and transfers are dispatched without a mesh, in a third of the time. Of devices that are
    all of other processes programs run there, and give arrays here that are absent.

    **Arguments:** `mesh`: of these devices alone. `batch_axes`: over which samples are divided, of those that this mesh
    has. `sockets`: to other processes, where any has a stage. `compiler_options`: as of `jax.jit`.
    """

    def __init__(
        self,
        mesh: Mesh,
        batch_axes: tuple[str, ...] = (),
        sockets: Sockets | None = None,
        *,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.mesh, self.batch_axes, self._sockets = mesh, axes_of(mesh, batch_axes), sockets
        self._ways: dict[Any, Way] = {}
        self._compiler_options = None if not compiler_options else dict(compiler_options)
        self.is_here = any(one.process_index == jax.process_index() for one in mesh.devices.flat)
        self._device: Any = mesh.devices.flat[0] if mesh.size == 1 else None
        self.whole: Sharding = self.along((), None)

    @property
    def is_bounded(self) -> bool:
        """Whether it must not be given many programs ahead: those of several CPU devices wait for one another."""
        return self._device is None and any(one.platform == "cpu" for one in self.mesh.devices.flat)

    @property
    def is_one_cpu(self) -> bool:
        """Whether it is a single device of the host's processor."""
        return self._device is not None and self._device.platform == "cpu"

    @property
    def is_divided(self) -> bool:
        """Whether there is more than one device."""
        return self._device is None

    @property
    def samples(self) -> NamedSharding:
        """How samples lie that a loader brings here."""
        return NamedSharding(self.mesh, PartitionSpec(self.batch_axes) if self.batch_axes else PartitionSpec())

    @property
    def all_samples(self) -> NamedSharding:
        """How samples lie there of which devices cannot have equal parts."""
        return NamedSharding(self.mesh, PartitionSpec())

    def along(self, shape: Sequence[int], dim: int | None) -> Sharding:
        """Returns how an array lies that has samples along a dim, or none."""
        if self._device is not None:
            return SingleDeviceSharding(self._device)
        return along_batch(self.mesh, self.batch_axes, shape, dim)

    def lies(self, layout: Layout, *, in_parts: bool = False) -> Sharding:
        """Returns how a variable lies that has a layout, in its stored form; or parts of it, one a device."""
        if in_parts:
            return NamedSharding(self.mesh, PartitionSpec(self.batch_axes, *layout.spec))
        return layout.sharding(self.mesh) if layout.axes else self.whole

    @property
    def num_parts(self) -> int:
        """Among how many devices samples are divided."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    @property
    def traced_on(self) -> AbstractMesh:
        """The mesh under which programs for these devices are traced."""
        return automatic(self.mesh) if self._device is None else AbstractMesh((), ())

    def compile(
        self,
        fn: Callable[..., Any],
        ins: tuple[Any, ...],
        outs: Any,
        *,
        donate: tuple[int, ...] = (),
        products: Mapping[str, str] = AS_IS,
    ) -> Any:
        """Returns the jitted function.

        **Arguments:** `ins`, `outs`: shardings, or prefixes of PyTrees of such. `products`: options of the compiler for
        these; what the user gives prevails.
        """
        if not self.is_here:
            return AbsentProgram(fn, outs, self.traced_on)
        options = {**products, **(self._compiler_options or {})} or None
        if self._device is None:
            on: dict[str, Any] = {"in_shardings": ins, "out_shardings": outs}
            return compile_on(self.mesh, fn, **on, donate=donate, compiler_options=options)

        def run(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return fn(*args)

        # What takes nothing would run on the first device of all.
        out = None if ins else self.whole
        return jax.jit(run, donate_argnums=donate, out_shardings=out, compiler_options=options)

    def place(self, arrays: Sequence[Any], shardings: Sequence[Sharding]) -> Sequence[Any]:
        """Brings arrays here that this process has, all processes alike. **Arguments:** `shardings`: of this home."""
        if not self.is_here:
            return tuple(absent(one, on) for one, on in zip(arrays, shardings, strict=True))
        found: Sequence[Any] = place(tuple(arrays), tuple(shardings))
        # What nobody has committed to a device would be compiled for anew.
        return found if self._device is None else jax.device_put(found, self._device)

    def route(
        self, source: "Home", specs: Sequence[Any], shardings: Sequence[Sharding], lie: Sequence[Sharding]
    ) -> Way:
        """Returns a way from another home to this one, on which things may be sent while others are under way.

        **Arguments:** `specs`: of arrays. `shardings`: here. `lie`: how they do there.
        """
        return self._way(source, specs, shardings, lie, 0 if self._sockets is None else self._sockets.channel())

    def _way(
        self,
        source: "Home",
        specs: Sequence[Any],
        shardings: Sequence[Sharding],
        lie: Sequence[Sharding],
        channel: int = 0,
    ) -> Way:
        if source.mesh.size == self.mesh.size:
            return Route(source, self, specs, shardings, self._sockets, channel)
        return Relay(self, specs, lie, shardings, self._sockets, channel)

    def bring(self, arrays: Sequence[Any], source: "Home", shardings: Sequence[Sharding]) -> Sequence[Any]:
        """Brings arrays here from another home. **Arguments:** `shardings`: of this home."""
        if source is self or not arrays:
            return arrays
        specs, lie = (
            tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in arrays),
            [one.sharding for one in arrays],
        )
        form = (source, specs, tuple(shardings), tuple(lie))
        if form not in self._ways:
            self._ways[form] = self._way(source, specs, shardings, lie)
        return move(self._ways[form], arrays, shardings)


def without_mesh() -> AbstractContextManager[Any]:
    """Programs of a stage may not see the mesh that a user has set with `jax.set_mesh`, which is of all devices."""
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def axes_of(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns those axes that a mesh has."""
    return tuple(one for one in axes if one in mesh.axis_names)


def sub_meshes(mesh: Mesh, axis: str, replicas: Sequence[int] | None = None) -> list[Mesh]:
    """Returns the meshes of consecutive places along an axis.

    They have the other axes; the axis itself is one of theirs where there are several places, or no other axis.

    **Arguments:** `replicas`: how many places each mesh is of; by default one.
    """
    at = mesh.axis_names.index(axis)
    found: list[Mesh] = []
    begin = 0
    for count in (1,) * mesh.devices.shape[at] if replicas is None else replicas:
        names = [name for name in mesh.axis_names if name != axis or count > 1] or [axis]
        kinds = [kind for kind, name in zip(mesh.axis_types, mesh.axis_names, strict=True) if name in names]
        devices = mesh.devices.take(range(begin, begin + count), at)
        devices = devices if axis in names else devices.squeeze(at)
        found.append(Mesh(devices, names, axis_types=tuple(kinds)))
        begin += count
    return found
