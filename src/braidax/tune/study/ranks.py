"""What the processes of a study are asked for; they are ranks of a gang, and keep a bench."""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from braidax.tune.attribution import TracePart

from .case import Case, Place
from .design import Length
from .factors import Setting
from .limits import Confinement

if TYPE_CHECKING:
    from braidax.comm import Communicator

_LOOPBACK = "127.0.0.1"
_THREADS_PER_DEVICE = 2


@dataclass(frozen=True)
class Begin:
    """What a rank begins with. **Fields:** `cache`: a folder for compiled programs. `seed`: of parameters, samples."""

    case: Case
    place: Place
    confinement: Confinement
    scratch: Path
    cache: Path
    seed: int


def begin(comm: "Communicator", given: Begin) -> Any:
    """Confines this process, joins JAX's processes, and returns its bench, to be kept."""
    place, processes = given.place, given.place.processes
    address = bytes(comm.broadcast(_free_address().encode() if comm.rank == 0 else b"")).decode()
    given.confinement.enter()
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, _THREADS_PER_DEVICE * place.devices)))

    import jax

    from braidax.program import pass_by_compilers

    from .measuring import Bench

    pass_by_compilers()
    jax.config.update("jax_num_cpu_devices", place.devices // processes)
    jax.config.update("jax_compilation_cache_dir", str(given.cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, processes, comm.rank, cluster_detection_method="deactivate")
    return Bench(given.case, given.scratch, seed=given.seed)


def prepare(comm: "Communicator", bench: Any, setting: Setting) -> None:
    """Makes all that runs of a setting need."""
    bench.prepare(setting)


def measure(comm: "Communicator", bench: Any, setting: Setting, length: Length) -> tuple[TracePart, float]:
    """Runs a setting, and returns what this rank has recorded, and the seconds of cores that a step took here."""
    trace, core_seconds = bench.run(setting, length)
    return TracePart.of(trace, comm.rank), core_seconds


def leave(comm: "Communicator", bench: Any) -> None:
    """Leaves JAX's processes, all at once."""
    import jax

    if jax.process_count() > 1:
        with contextlib.suppress(RuntimeError):
            jax.distributed.shutdown()


def _free_address() -> str:
    with socket.socket() as free:
        free.bind((_LOOPBACK, 0))
        return f"{_LOOPBACK}:{free.getsockname()[1]}"
