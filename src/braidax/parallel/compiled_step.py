"""A step compiled for a machine, which need not be here: its memory and what its devices send, by that compiler."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import jax
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.program import (
    HERE,
    Collective,
    CompiledProgram,
    Target,
    TooLarge,
    compile_ahead,
    exposed_part,
    find_target,
    made_of,
    total_sent,
)

from .plan.compiling import CompilerOption
from .plan.strategy import num_bytes

_DEFAULT_FRACTION = 0.75  # of a GPU's memory, that JAX takes if not told otherwise
_REMEDIES = (
    "give it more devices, FullySharded() to an axis whose parameters are whole, more microbatches=, or "
    "jax.checkpoint to the layers"
)


@dataclass(frozen=True)
class CompiledStep:
    """What the compiler of a machine says of a step; `print` shows it.

    **Fields:** `target`: the machine's name, and of its devices `device_kind`, `num_devices` and `memory_bytes`, None
    where it is not known. `held`: bytes on a device of what is there between steps, by name.
    `programs`: the two of a step, by name; `beside`: bytes of what lies on the device while one runs that is none of
    its arguments. `compiler_options`: as of `Plan`, on that machine.
    """

    target: str
    device_kind: str
    num_devices: int
    memory_bytes: int | None
    held: Mapping[str, int]
    programs: Mapping[str, CompiledProgram]
    beside: Mapping[str, int]
    compiler_options: tuple[CompilerOption, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The memory of a device that a step needs: the larger need of its two programs. Other batches are not in it,
        which a loader has brought ahead, nor are snapshots."""
        return max(program.memory.total + self.beside[name] for name, program in self.programs.items())

    @property
    def fits(self) -> bool:
        """Whether a device has as much memory."""
        return self.memory_bytes is None or self.peak_bytes <= self.memory_bytes

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Of both programs."""
        return tuple(one for program in self.programs.values() for one in program.collectives)

    @property
    def sent_bytes(self) -> float:
        """What a device sends in a step. What is in loops of unknown length is left out."""
        return sum(total_sent(self.collectives).values())

    @property
    def exposed_part(self) -> float:
        """Which part of these bytes is sent while no matrices are multiplied."""
        return exposed_part(self.collectives)

    def to_json(self) -> str:
        """Returns all of it as one JSON object."""
        programs = {
            name: {
                "memory": asdict(program.memory),
                "beside": self.beside[name],
                "collectives": [{**asdict(one), "sent_bytes": one.sent_bytes} for one in program.collectives],
            }
            for name, program in self.programs.items()
        }
        numbers = {"peak_bytes": self.peak_bytes, "sent_bytes": self.sent_bytes, "exposed_part": self.exposed_part}
        options = [asdict(one) for one in self.compiler_options]
        machine = {"target": self.target, "device_kind": self.device_kind, "num_devices": self.num_devices}
        tree = {**machine, "memory_bytes": self.memory_bytes, **numbers, "held": self.held}
        return json.dumps({**tree, "compiler_options": options, "programs": programs})

    def __str__(self) -> str:
        """The machine, memory, collectives."""
        head = f"compiled for  {self.target}: {self.num_devices} × {self.device_kind}"
        options = [f"compiler      {one.name}={one.value}: {one.why}" for one in self.compiler_options]
        return "\n".join([head, *options, *self._told_memory(), "", *self._told_collectives()])

    def _told_memory(self) -> Iterator[str]:
        limit = self.memory_bytes
        yield f"memory        {_size(self.peak_bytes)} a device{self._judged(limit)}"
        yield f"held          {_listed(self.held)}"
        yield ""
        rows: list[tuple[str, ...]] = [("program", "arguments", "outputs", "reused", "temporaries", "beside", "total")]
        for name, program in self.programs.items():
            memory, beside = program.memory, self.beside[name]
            parts = (memory.arguments, memory.outputs, memory.reused, memory.temporaries, beside, memory.total + beside)
            rows.append((name, *map(_size, parts)))
        yield from _table(rows)

    def _judged(self, limit: int | None) -> str:
        if limit is None:
            return ": it fits, or the compiler would have refused it"
        part = self.peak_bytes / limit
        if part > 1:
            return f" of {_size(limit)}: too large; {_REMEDIES}"
        if part > _DEFAULT_FRACTION:
            return f" of {_size(limit)}: it fits with XLA_PYTHON_CLIENT_MEM_FRACTION={min(part + 0.02, 1):.2f} or more"
        return f" of {_size(limit)}: it fits"

    def _told_collectives(self) -> Iterator[str]:
        if not self.collectives:
            yield "collectives   none"
            return
        exposed = f"{100 * self.exposed_part:.1f} % of it while no matrices are multiplied"
        yield f"collectives   a device sends {_size(self.sent_bytes)} a step, {exposed}"
        if any(one.in_unknown_loop for one in self.collectives):
            yield "              and more in loops of unknown length, in each turn"
        yield ""
        rows: list[tuple[str, ...]] = [("program", "collective", "devices", "times", "sent", "meanwhile")]
        for name, program in self.programs.items():
            ordered = sorted(program.collectives, key=_kind)
            for _, same in groupby(ordered, key=_kind):
                rows.append((name, *_told(tuple(same))))
        yield from _table(rows)


def target_mesh(target: str, mesh: Mesh) -> tuple[Target, Mesh]:
    """Returns a target, and a mesh of its devices like one there is. **Raises:** `ArgumentError`, `MissingExtra`."""
    if target == HERE:
        return made_of([*mesh.devices.flat]), mesh
    found = find_target(target)
    if len(found.devices) != mesh.size:
        raise ArgumentError(
            f"target is {target!r}, which has {len(found.devices)} devices, and the step's mesh {mesh.size} "
            f"({dict(mesh.shape)}): make the step on a mesh of {len(found.devices)} devices; they may be "
            f'virtual ones, jax.config.update("jax_num_cpu_devices", {len(found.devices)}) before JAX starts'
        )
    devices = [*found.devices]
    return found, jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, devices=devices)


def compile_step(
    lowered: Any, target: Target, options: tuple[CompilerOption, ...], *, held: Mapping[str, Any], read: Any, moved: Any
) -> CompiledStep:
    """Compiles the two programs of a step, whose mesh is of a target's devices.

    **Arguments:** `lowered`: as of `Step.lower`, with these `options`. `held`: specs with shardings of what there is
    between steps, by name; `read`: those of them that the gradients read; `moved`: that apply is given.

    **Raises:** `ArgumentError` where the compiler says that it is too large.
    """
    sizes = {name: _bytes_on_a_device(specs) for name, specs in held.items()}
    programs: dict[str, CompiledProgram] = {}
    for name, program in lowered._asdict().items():
        try:
            programs[name] = compile_ahead(program)
        except TooLarge as error:
            raise ArgumentError(
                f"target is {target.name!r}, and the {name} of the step cannot be compiled for it: {error}; a device "
                f"holds {_listed(sizes)} between steps: {_REMEDIES}"
            ) from error
    there, given = _bytes_on_a_device([*held.values()]), _bytes_on_a_device(read)
    unread = max(0, given - programs["gradients"].memory.arguments)  # what the loss does not use is no argument
    beside = {"gradients": there - given + unread, "apply": there - _bytes_on_a_device(moved)}
    kind, count = target.devices[0].device_kind, len(target.devices)
    return CompiledStep(target.name, kind, count, target.memory_bytes, sizes, programs, beside, options)


def _bytes_on_a_device(specs: Any) -> int:
    return sum(
        num_bytes(jax.ShapeDtypeStruct(spec.sharding.shard_shape(spec.shape), spec.dtype))
        for spec in jax.tree.leaves(specs)
    )


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_size(count)}" for name, count in sizes.items() if count)


def _told(same: tuple[Collective, ...]) -> tuple[str, ...]:
    one, times = same[0], sum(each.times for each in same)
    sent = sum(each.times * each.sent_bytes for each in same)
    unknown = " a turn" if one.in_unknown_loop else ""
    told = (
        "matrix products" if one.is_covered else "no matrix products" if one.is_async else "nothing: it is waited for"
    )
    return one.kind, str(one.group_size), f"{times:,}", f"{_size(sent)}{unknown}", told


def _kind(one: Collective) -> tuple[Any, ...]:
    return one.kind, one.group_size, one.in_unknown_loop, not one.is_covered, not one.is_async


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *others = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join((first, *others)).rstrip()


def _size(count: float) -> str:
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if count >= pair[0]), (1, "B"))
    return f"{count / unit:.4g} {name}"
