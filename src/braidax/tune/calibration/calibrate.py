"""`calibrate`: the rates of this machine, measured once and kept in the user's cache folder."""

import contextlib
import json
import logging
import os
import stat
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import xxhash
from jax.sharding import Mesh

from braidax.data.storage.derived import cache_folder
from braidax.errors import ArgumentError
from braidax.parallel import measure_machine
from braidax.parallel.plan.costs.measure import agreed
from braidax.tune.calibration.disks import MAX_BYTES, measure_disk
from braidax.tune.calibration.hosts import measure_copies, measure_cores
from braidax.tune.calibration.identity import Identity
from braidax.tune.calibration.rates import Calibration

_log = logging.getLogger("braidax")
_NUM_RUNS = 3  # of each program of links and products
_MOST_TEXT_BYTES = 1 << 20  # of a file that is read; a calibration has a few thousand


def calibrate(
    mesh: Mesh,
    folder: str | os.PathLike[str] = ".",
    *,
    measure: Literal["once", "again"] = "once",
    cache: str | os.PathLike[str] | None = None,
    max_bytes: int = MAX_BYTES,
    wait_seconds: float = 60.0,
) -> Calibration:
    """Returns what this machine can do: what was measured and kept, if it was on this machine; else it is measured now.

    Measuring takes some seconds, in which nothing else should run. Processes that share the mesh call it together;
    links and products are those of all, the rest that of each one's host. A file that is broken, of another version or
    of another machine is not used: that is logged, and it is measured anew.

    **Arguments:** `mesh`: whose links, and whose first device here are measured. `folder`: whose disk is: `max_bytes`
    at most are written there for a moment, in a file without a name. `measure`: `"again"` in any case. `cache`: the
    folder that it is kept in, by default `$BRAIDAX_CACHE`, or else `~/.cache/braidax`. `wait_seconds`: for one answer
    of the devices.

    **Raises:** `ArgumentError` for a folder that is not there, cannot be written to or is full; `WaitTimeout`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ArgumentError(f"folder={str(folder)!r} is no folder: expected one whose disk is to be measured")
    if measure not in ("once", "again"):
        raise ArgumentError(f'measure={measure!r}: expected "once" or "again"')
    if max_bytes < 1 << 20:
        raise ArgumentError(f"max_bytes={max_bytes!r}: expected 1 MiB or more, such as {MAX_BYTES}")
    identity = Identity.of(mesh, folder)
    path = (cache_folder() if cache is None else Path(cache)) / _name(identity)
    kept = None if measure == "again" else _kept(path, identity)
    if agreed(mesh, float(kept is not None), np.min, wait_seconds=wait_seconds) and kept is not None:
        return kept
    found = _measured(mesh, folder, identity, max_bytes, wait_seconds)
    _keep(path, found)
    return found


def _measured(mesh: Mesh, folder: Path, identity: Identity, max_bytes: int, wait_seconds: float) -> Calibration:
    disk = measure_disk(folder, max_bytes=max_bytes)  # what can be wrong with it is found first
    own = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    copies = measure_copies(own, wait_seconds=wait_seconds)
    cores = measure_cores(wait_seconds=wait_seconds)
    return Calibration(
        identity, measure_machine(mesh, num_runs=_NUM_RUNS, wait_seconds=wait_seconds), copies, disk, cores
    )


def _name(identity: Identity) -> str:
    """Returns the name of the file: another one for what changes seldom, so that machines that share a folder do not
    take turns."""
    devices = {name: value for name, value in asdict(identity.devices).items() if name != "memory_bytes"}
    about = [devices, identity.axes, identity.processor, identity.filesystem, identity.disk]
    return f"{xxhash.xxh3_64_hexdigest(json.dumps(about).encode())}.calibration.json"


def _kept(path: Path, identity: Identity) -> Calibration | None:
    """Returns what a file holds, if it is of this machine; says why not."""
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ArgumentError("is no file")
            text = file.read(_MOST_TEXT_BYTES)
        found = Calibration.from_json(text.decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be used (%s): the machine is measured anew", path, error)
        return None
    if told := found.identity.differences(identity):
        _log.warning("%s is of another machine (%s): this one is measured", path, "; ".join(told))
        return None
    return found


def _keep(path: Path, found: Calibration) -> None:
    """Keeps it, whole or not at all; where that cannot be, it says so."""
    unfinished: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".calibration.part", delete=False) as file:
            unfinished = Path(file.name)
            file.write(found.to_json())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        _log.warning("%s cannot be written (%s): the machine is measured again next time", path, error.strerror)
        if unfinished is not None:
            with contextlib.suppress(OSError):
                unfinished.unlink()
