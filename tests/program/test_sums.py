"""Sums over devices in 16 bits, in islands that leave some axes to XLA: its CPU compiler ends the process there."""

import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from braidax.program import all_gather, psum, psum_scatter

MESH = ((2, 4), ("sums", "left"))
SUMS = {
    "psum": (lambda x: psum(x[0], "sums"), PartitionSpec("sums"), PartitionSpec()),
    "psum_scatter": (lambda x: psum_scatter(x[0], "sums", dim=0), PartitionSpec("sums"), PartitionSpec("sums")),
    "all_gather": (lambda x: all_gather(x, "sums", dim=1)[None], PartitionSpec(None, "sums"), PartitionSpec("sums")),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow), jnp.float32])
@pytest.mark.parametrize("name", [*SUMS])
def test_they_and_their_gradients_are_compiled_and_right(name: str, dtype: Any) -> None:
    local, given, made = SUMS[name]
    mesh = jax.make_mesh(*MESH, axis_types=(AxisType.Auto,) * 2)

    def total(x: jax.Array) -> Any:
        found: Any = jax.shard_map(local, in_specs=given, out_specs=made, axis_names={"sums"}, check_vma=False)(x)
        return (found.astype(jnp.float32) ** 2).sum(), found

    x = jnp.arange(2 * 8 * 4, dtype=dtype).reshape(2, 8, 4) / 64
    with jax.set_mesh(mesh):
        (_, found), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
    assert found.dtype == gradient.dtype == dtype
    expected = np.asarray(x, np.float32)
    if name == "all_gather":
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.stack([expected] * 2))
        np.testing.assert_allclose(np.asarray(gradient, np.float32), 4 * expected, rtol=1e-2)
    else:
        np.testing.assert_allclose(np.asarray(found, np.float32), expected.sum(0), rtol=1e-2)
        np.testing.assert_allclose(np.asarray(gradient, np.float32), np.stack([2 * expected.sum(0)] * 2), rtol=1e-2)


def test_xla_still_ends_the_process_else() -> None:
    """When this fails, `sums` can go."""
    code = f"""
import jax
from jax.sharding import AxisType, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh(*{MESH!r}, axis_types=(AxisType.Auto,) * 2)
local = lambda x: jax.lax.psum(x[0], "sums")
with jax.set_mesh(mesh):
    mapped = jax.shard_map(local, in_specs=P("sums"), out_specs=P(), axis_names={{"sums"}}, check_vma=False)
    jax.jit(mapped).lower(jax.ShapeDtypeStruct((2, 8, 4), "bfloat16")).compile()
"""
    run = partial(subprocess.run, capture_output=True, timeout=120)
    found = run([sys.executable, "-c", code])
    assert found.returncode == -6
    assert b"Invalid binary instruction opcode copy" in found.stderr
