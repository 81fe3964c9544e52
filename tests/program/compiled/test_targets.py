"""Machines that are not here: their names, their devices, and that JAX stays as it is."""

import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from braidax.errors import ArgumentError, MissingExtra
from braidax.program import TooLarge, compile_ahead, find_target, pass_by_compilers

KNOWN = r"such as h100:8 \(1 to 8 GPUs, or hosts of 8: h100:16\), v5e:4x4, v6e:4x4, v4:2x2x1, v5p:2x2x1, tpu7x:2x2x1, "


@pytest.mark.usefixtures("aot")
def test_gpus_stand_in_hosts_of_eight_and_jax_has_none() -> None:
    some, many = find_target("h100:3"), find_target("h100:16")
    assert [len(target.devices) for target in (some, many)] == [3, 16]
    assert [device.process_index for device in many.devices] == [0] * 8 + [1] * 8
    assert {(device.platform, device.device_kind) for device in many.devices} == {("gpu", "NVIDIA H100 80GB HBM3")}
    assert many.memory_bytes == 84_942_979_072
    assert {device.platform for device in jax.devices()} == {"cpu"}
    with pytest.raises(RuntimeError, match="cuda"):
        jax.devices("cuda")


def test_the_machine_that_is_here_has_its_devices_and_their_memory() -> None:
    found = find_target("here")
    assert found.devices == tuple(jax.devices())
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.memory_bytes == host // len(jax.devices())


@pytest.mark.parametrize("name", ["h100", "h100:x", "h100:2x4", "a100:8", "v5e", "v5e:4", "v5e:4x4x4", "v5p:4x4", ""])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^target is {name!r}, expected a machine and its devices, {KNOWN}"):
        find_target(name)


@pytest.mark.parametrize("count", [0, 9, 12, 20])
def test_gpus_that_fill_no_hosts(count: int) -> None:
    with pytest.raises(
        ArgumentError, match=rf"^target is 'h100:{count}', expected 1 to 8 GPUs, or hosts of 8 of them: "
    ):
        find_target(f"h100:{count}")


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("h100:5", "jax_plugins.xla_cuda12", "aot"), ("v5e:8x8", "libtpu", "aot-tpu")],
)
def test_a_compiler_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf'^compiling for {name} needs .* pip install "braidax\[{extra}\]"$'):
        find_target(name)


@pytest.mark.usefixtures("aot")
def test_a_compiler_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"jax-cuda12-pjrt": "0.98", "jaxlib": "0.99"}.get)
    with pytest.raises(ArgumentError, match=r'beside jaxlib 0\.99: .*, pip install "jax-cuda12-pjrt==0\.99"$'):
        find_target("h100:6")


@pytest.mark.parametrize("runs", [False, True])
def test_jax_passes_by_what_can_only_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: bool) -> None:
    started = list[str]()
    plugin: Any = ModuleType("jax_plugins.xla_cuda12")
    plugin.initialize = lambda: started.append("plugin")
    monkeypatch.setitem(sys.modules, "jax_plugins", ModuleType("jax_plugins"))
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda12", plugin)
    if runs:
        (tmp_path / "jax_cuda12_plugin.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
    pass_by_compilers()
    plugin.initialize()
    assert started == (["plugin"] if runs else [])


def test_without_a_compiler_there_is_nothing_to_pass_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda12", None)
    pass_by_compilers()


@pytest.mark.parametrize(
    ("message", "error"),
    [("RESOURCE_EXHAUSTED: Ran out of memory on HBM\nmore", TooLarge), ("INTERNAL: x", jax.errors.JaxRuntimeError)],
)
def test_what_the_compiler_refuses(monkeypatch: pytest.MonkeyPatch, message: str, error: type[Exception]) -> None:
    def refuse(self: Any) -> Any:
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(error, match=message.splitlines()[0]):
        compile_ahead(jax.jit(lambda: 0).lower())


@pytest.mark.slow
@pytest.mark.usefixtures("aot")
def test_tpus_stand_in_grids() -> None:
    grid = find_target("v5e:4x4")
    assert (len(grid.devices), grid.memory_bytes, grid.devices[0].device_kind) == (16, None, "TPU v5 lite")
    with pytest.raises(
        ArgumentError, match=rf"^target is 'v5e:3x3', which the compiler does not know .* expected {KNOWN}"
    ):
        find_target("v5e:3x3")
