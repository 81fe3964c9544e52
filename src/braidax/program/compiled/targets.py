"""Machines that programs are compiled for, by name, and their devices; they need not be here.

What compiles is the plugin that JAX itself would use on such a machine, loaded beside the devices that are here. JAX
is not told of it: its platforms, its default device and what it does stay as they are.
"""

import os
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jaxlib import xla_client

from braidax.errors import ArgumentError, MissingExtra, import_extra

_GPUS_A_HOST = 8
_GPU_PLUGIN = "jax_plugins.xla_cuda12"
_GPU_RUNTIMES = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # without one of these the plugin can only compile
_H100 = Path(__file__).with_name("h100_sxm.txtpb")
_MEMORY = re.compile(r"device_memory_size: (\d+)")
_TPU_DIMS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}  # of the grid of chips
_TPU_ENVIRONMENT = {  # else it asks the network on which machine it is, and takes a lock that only one process gets
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_KNOWN = "h100:8 (1 to 8 GPUs, or hosts of 8: h100:16), v5e:4x4, v6e:4x4, v4:2x2x1, v5p:2x2x1, tpu7x:2x2x1, here"

HERE = "here"
"""The name of the machine that runs this."""


@dataclass(frozen=True)
class Target:
    """A machine that programs can be compiled for.

    **Fields:** its `name`. `devices`: only those that are here run anything. `memory_bytes`: of a device; None where
    the compiler itself refuses what is too large.
    """

    name: str
    devices: tuple[Any, ...]
    memory_bytes: int | None


@cache
def find_target(name: str) -> Target:
    """Returns the machine of a name: `"h100:16"` for 16 GPUs in hosts of 8, `"v5e:4x4"` for a grid of TPU chips.

    `"here"` is that with JAX' own devices.

    **Raises:** `ArgumentError` for a name that is none, or that the compiler does not know; `MissingExtra`.
    """
    if name == HERE:
        return made_of(jax.devices())
    kind, _, size = name.partition(":")
    if kind == "h100" and size.isdecimal():
        return _gpus(name, int(size))
    if re.fullmatch(r"\d+(x\d+)*", size) and size.count("x") + 1 == _TPU_DIMS.get(kind):
        return _tpus(name)
    raise ArgumentError(f"target is {name!r}, expected a machine and its devices, such as {_KNOWN}")


def made_of(devices: Sequence[Any]) -> Target:
    """Returns the machine that devices of JAX are of. CPU devices have an equal part of their host's memory each."""
    first = devices[0]
    if first.platform == "cpu":
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Target(HERE, tuple(devices), host // jax.local_device_count())
    stats: Mapping[str, int] = first.memory_stats() or {}
    return Target(HERE, tuple(devices), stats.get("bytes_limit"))


def pass_by_compilers() -> None:
    """Has JAX, when it starts, pass by a plugin for GPUs that can only compile; it would complain of it else."""
    try:
        plugin: Any = import_extra(_GPU_PLUGIN, "aot", purpose="compiling for GPUs")
    except MissingExtra:
        return
    if not any(find_spec(name) for name in _GPU_RUNTIMES):
        plugin.initialize = lambda: None


def _gpus(name: str, count: int) -> Target:
    hosts, left = divmod(count, _GPUS_A_HOST)
    if count < 1 or (hosts > 0 and count != _GPUS_A_HOST and left):
        raise ArgumentError(
            f"target is {name!r}, expected 1 to 8 GPUs, or hosts of 8 of them: h100:8, h100:16, h100:24"
        )
    plugin = import_extra(_GPU_PLUGIN, "aot", purpose=f"compiling for {name}")
    version, expected = metadata.version("jax-cuda12-pjrt"), metadata.version("jaxlib")
    if version != expected:
        raise ArgumentError(
            f"target is {name!r}, and what compiles for it is jax-cuda12-pjrt {version} beside jaxlib {expected}: "
            f'install the same version, pip install "jax-cuda12-pjrt=={expected}"'
        )
    config = _H100.read_text()
    shape = f"1x{hosts}x{_GPUS_A_HOST}" if hosts else f"1x1x{count}"
    library = Path(str(plugin.__file__)).with_name("xla_cuda_plugin.so")
    devices = _devices(name, "braidax-cuda", library, "", {"topology": shape, "target_config": config})
    found = _MEMORY.search(config)
    assert found is not None, "the description of the device tells its memory"
    return Target(name, devices, int(found[1]))


def _tpus(name: str) -> Target:
    with _environment(_TPU_ENVIRONMENT):
        library = import_extra("libtpu", "aot-tpu", purpose=f"compiling for {name}").get_library_path()
        options = {"chips_per_host_bounds": (1, 1, 1)} if name == "v5e:1x1" else {}
        return Target(name, _devices(name, "braidax-tpu", Path(library), name, options), None)


def _devices(name: str, plugin: str, library: Path, topology: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns devices of a plugin, which is loaded under a name of its own: JAX may yet load it under another."""
    api = _loaded(plugin, str(library))
    try:
        found: Any = xla_client.make_c_api_device_topology(api, topology, **options)
        return tuple(found._make_compile_only_devices())
    except jax.errors.JaxRuntimeError as error:
        raise ArgumentError(
            f"target is {name!r}, which the compiler does not know ({error}); expected such as {_KNOWN}"
        ) from error


@cache
def _loaded(plugin: str, library: str) -> Any:
    api = xla_client.load_pjrt_plugin_dynamically(plugin, library)
    xla_client.initialize_pjrt_plugin(plugin)
    return api


@contextmanager
def _environment(defaults: Mapping[str, str]) -> Generator[None, None, None]:
    """Sets variables that are not set, for as long as the block runs."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
