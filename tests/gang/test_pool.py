"""A program makes more virtual devices than it was launched for: its steps have threads enough all the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from braidax.gang.runner import num_threads

STEPS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((16,), ("data",), axis_types=(AxisType.Auto,))
x = jax.make_array_from_callback((512, 8), NamedSharding(mesh, P("data")), lambda i: np.ones((512, 8), np.float32)[i])
w = jax.device_put(jnp.zeros(8), NamedSharding(mesh, P()))
gradients = jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w - 36.0) ** 2)))
apply = jax.jit(lambda w, g: w - 0.01 * g)
for _ in range(150):
    w = apply(w, gradients(w, x))
print("ended with", w[0])
"""


@pytest.mark.slow  # how many threads it is launched with is computed below
def test_steps_that_run_ahead_end(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    result = subprocess.run(
        [sys.executable, "-m", "braidax.cli", "launch", "--processes", "2", str(script)],
        env={name: text for name, text in os.environ.items() if name not in ("PJRT_NPROC", "XLA_FLAGS")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    ended = re.findall(r"^\[(\d)\] ended with (.*)$", result.stdout, re.MULTILINE)
    assert sorted(rank for rank, _ in ended) == ["0", "1"]
    assert [float(weight) for _, weight in ended] == pytest.approx([4.5, 4.5], abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "devices", "expected"),
    [("", None, 64), ("", 8, 64), ("", 100, 200), ("--a=1 --xla_force_host_platform_device_count=50 --b", 8, 100)],
)
def test_the_pool_has_two_threads_for_each_device(
    monkeypatch: pytest.MonkeyPatch, flags: str, devices: int | None, expected: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert num_threads({"XLA_FLAGS": flags}, devices) == expected
