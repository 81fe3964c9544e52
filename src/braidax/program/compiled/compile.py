"""A program compiled for any machine: what it needs of a device's memory, and what it sends."""

from dataclasses import dataclass
from typing import Any

import jax
from jax._src import config

from .collectives import Collective, collectives_of

_NEVER = 1e9  # seconds: the cache of compiled programs keeps nothing that it could not load here again


class TooLarge(Exception):
    """The compiler refuses a program, which does not fit into the memory of a device."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a device's memory that a program needs.

    **Fields:** `arguments` that it reads, `outputs` that it leaves, `reused`: of the arguments, for outputs.
    `temporaries`: what it needs beside while it runs.
    """

    arguments: int
    outputs: int
    reused: int
    temporaries: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.outputs - self.reused + self.temporaries


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program. **Fields:** `memory` that it needs, and its `collectives`."""

    memory: Memory
    collectives: tuple[Collective, ...]


def compile_ahead(lowered: jax.stages.Lowered) -> CompiledProgram:
    """Compiles a lowered program for the devices of its shardings, which need not be here.

    **Raises:** `TooLarge`, with the compiler's words, where it refuses what does not fit.
    """
    try:
        with config.persistent_cache_min_compile_time_secs(_NEVER):
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise TooLarge(str(error).split("\n")[0].strip()) from error
        raise
    found: Any = compiled.memory_analysis()
    reused = found.alias_size_in_bytes
    arguments, outputs = found.argument_size_in_bytes, found.output_size_in_bytes
    memory = Memory(arguments, outputs, reused, found.temp_size_in_bytes)
    return CompiledProgram(memory, collectives_of(compiled.as_text() or ""))
