"""Leaves that lie in many ways on the devices of several processes, as they are saved or otherwise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS = 4096


def placed(kind: str) -> dict[str, Any]:
    """How each leaf lies: as it is saved, or otherwise."""
    devices = np.array(jax.devices())
    mesh, wide = Mesh(devices.reshape(4, 2), ("a", "b")), Mesh(devices[::-1].reshape(2, 4), ("a", "b"))
    stage = Mesh(devices[4:6], ("a",))
    shardings = {
        "rows": (NamedSharding(mesh, P(("a", "b"))), NamedSharding(wide, P(("a", "b")))),
        "columns": (NamedSharding(mesh, P("b", "a")), NamedSharding(mesh, P())),
        "replicated": (NamedSharding(mesh, P()), NamedSharding(mesh, P("a"))),
        "half": (NamedSharding(mesh, P("b")), NamedSharding(stage, P("a"))),
        "stage": (NamedSharding(stage, P("a")), NamedSharding(wide, P("a"))),
        "keys": (NamedSharding(mesh, P("a")), NamedSharding(wide, P())),
        "step": (NamedSharding(mesh, P()), NamedSharding(wide, P())),
    }
    return {name: pair[kind == "otherwise"] for name, pair in shardings.items()}


def whole() -> dict[str, Any]:
    """What is in the leaves."""
    random = np.random.default_rng(0)
    return {
        "rows": random.normal(size=(ROWS, 16)).astype(np.float32),
        "columns": random.normal(size=(16, 8)).astype(jnp.bfloat16),
        "replicated": random.integers(0, 100, (ROWS, 24), np.int32),
        "half": random.integers(-8, 7, (32, 3)).astype(jnp.int4),
        "stage": random.normal(size=(6,)).astype(np.float16),
        "keys": np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), 8))),
        "step": np.int32(7),
    }


def tree(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """The leaves on their devices, and what each process has for itself."""
    made: dict[str, Any] = {}
    for name, sharding in placed(kind).items():
        value = np.asarray(content[name])
        array = jax.make_array_from_callback(
            value.shape, sharding, lambda index, value=value: value[index], dtype=value.dtype
        )
        made[name] = jax.random.wrap_key_data(array) if name == "keys" else array
    return made


def own(rank: int) -> dict[str, Any]:
    """What each process has for itself, otherwise than process 0."""
    return {"cursor": (1, rank), "numpy": np.full(3, rank), "local": jnp.full(2, rank)}
