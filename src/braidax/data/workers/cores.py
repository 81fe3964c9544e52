"""Which cores are near the devices: those of their NUMA nodes, from which data need not cross to another socket.

Sysfs says which cores a node has and at which node a PCI device is; NVIDIA's driver says in `/proc` which GPUs there
are. CUDA does not number them by their minor numbers but by their places on the bus, and leaves out those that the
process may not open.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


def cores_near(devices: Iterable[Any], *, root: Path = Path("/")) -> frozenset[int] | None:
    """Returns the cores to read on for some devices: those that the calling thread may use, of the devices' NUMA nodes.

    **Arguments:** `devices`: `jax.Device`s of this process; CPU devices compute on all of its cores, and are near to
    all. `root`: where the file system begins.

    **Returns:** the numbers of the cores; None where there is nothing to choose or to know: one node, all nodes near,
    none that this process may use, a device whose node the system does not tell, or no Linux.
    """
    if sys.platform != "linux":
        return None
    usable = frozenset(os.sched_getaffinity(0))
    gpus = _visible_gpus(root)
    near = frozenset[int]()
    for device in devices:
        cores = usable if device.platform == "cpu" else _cores_near_gpu(device, gpus, root)
        if not cores:
            return None
        near |= cores
    near &= usable
    return near if near and near != usable else None


class _Gpu(NamedTuple):
    """A GPU of this machine that the process may open; `bus` is its place, as sysfs names it."""

    bus: str
    uuid: str
    model: str


def _cores_near_gpu(device: Any, gpus: list[_Gpu], root: Path) -> frozenset[int]:
    """Returns the cores of a GPU's node, none where that is not known."""
    number = device.local_hardware_id  # CUDA's, also where JAX was given some of them only
    if number is None or not 0 <= number < len(gpus) or "MIG" in device.device_kind:  # parts are numbered otherwise
        return frozenset()
    node = _text(root / "sys/bus/pci/devices" / gpus[number].bus / "numa_node")
    cores = _text(root / "sys/devices/system/node" / f"node{node}" / "cpulist")  # node -1: the firmware does not say
    ends = [[int(end) for end in part.split("-")] for part in cores.split(",") if part]
    return frozenset(core for part in ends for core in range(part[0], part[-1] + 1))


def _visible_gpus(root: Path) -> list[_Gpu]:
    """Returns the GPUs as CUDA numbers them in this process, up to the first one of which that cannot be known."""
    found = _gpus(root)
    order, chosen = os.environ.get("CUDA_DEVICE_ORDER"), os.environ.get("CUDA_VISIBLE_DEVICES")
    by_bus = order == "PCI_BUS_ID" or len({gpu.model for gpu in found}) == 1  # otherwise by a guess of their speed
    numbered = found if by_bus else []
    if chosen is None:
        return numbered
    visible: list[_Gpu] = []
    for name in map(str.strip, chosen.split(",")):
        if name.isdecimal():
            meant = numbered[int(name) :][:1]
        else:
            meant = [gpu for gpu in found if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if len(meant) != 1:
            break
        visible += meant
    return visible


def _gpus(root: Path) -> list[_Gpu]:
    """Returns the GPUs that this process may open, by their places on the bus."""
    found: list[_Gpu] = []
    for folder in root.glob("proc/driver/nvidia/gpus/*"):
        lines = (line.partition(":") for line in _text(folder / "information").splitlines())
        facts = {name.strip(): text.strip() for name, _, text in lines}
        # A container or a batch system may show all GPUs and let some be opened.
        if os.access(root / "dev" / f"nvidia{facts.get('Device Minor')}", os.R_OK | os.W_OK):
            found.append(_Gpu(folder.name, facts.get("GPU UUID", ""), facts.get("Model", "")))
    return sorted(found, key=lambda gpu: [int(part, 16) for part in gpu.bus.replace(".", ":").split(":")])


def _text(path: Path) -> str:
    """Returns what a file holds, nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
