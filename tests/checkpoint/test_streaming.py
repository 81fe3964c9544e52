"""What restoring holds: the state, and a small part of one leaf besides, whatever reads it; of several processes each
its part."""

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint import restore, restore_safetensors
from braidax.gang import LocalGang
from tests.support.checkpoint.saving import Longer, commit
from tests.support.comm.ranks import by_day
from tests.support.data.jax_gang import RUN_SECONDS, jax_gang

LAYERS, WIDTH, ROWS = 6, 1024, 4095
SHAPES = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH), "table": (ROWS, WIDTH)}
SPECS = {"up": P(None, None, "a"), "down": P(None, "a"), "table": P("a")}
LEAF_BYTES = 4 * LAYERS * 4 * WIDTH * WIDTH
STATE_BYTES = 2 * LEAF_BYTES + 4 * 4096 * WIDTH  # the table is padded


def array(name: str) -> np.ndarray:
    size = int(np.prod(SHAPES[name]))
    return (np.arange(size, dtype=np.uint32) * (2 * len(name) + 1)).view(np.float32).reshape(SHAPES[name])


def layers(path: str) -> str | list[str]:
    return "embed" if path.endswith("table") else [f"model.{at}.{path[7:]}.weight" for at in range(LAYERS)]


def transposed(path: str, tensor: np.ndarray) -> np.ndarray:
    return tensor if path.endswith("table") else tensor.T


READERS: dict[str, Callable[[Path, Any], Any]] = {
    "ours": lambda root, like: restore(root / "ours", like).tree,
    "safetensors": lambda root, like: restore_safetensors(next((root / "ours").glob("*/*.safetensors")), like),
    "layers": lambda root, like: restore_safetensors(root / "hub", like, name=layers, view=transposed),
}


def restored(comm: Any, root: Path, reader: str) -> tuple[float, float, list[str]]:
    """Returns bytes of what was restored here, the most that this process had more, and the leaves that are wrong."""
    mesh = Mesh(np.array(jax.devices()), ("a",))
    like = {
        name: jax.ShapeDtypeStruct(
            (4096, WIDTH) if name == "table" else shape, jnp.float32, sharding=NamedSharding(mesh, SPECS[name])
        )
        for name, shape in SHAPES.items()
    }
    jax.block_until_ready(jax.device_put(np.zeros(8), jax.local_devices()[0]))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = _held("VmRSS")
    found = jax.block_until_ready(READERS[reader](root, Longer(like, {"arrays/table": SHAPES["table"]}))).arrays
    most = _held("VmHWM") - before
    wrong: list[str] = []
    num_bytes = 0
    for name, leaf in found.items():
        whole = np.pad(array(name), ((0, 1), (0, 0))) if name == "table" else array(name)
        for shard in leaf.addressable_shards:
            num_bytes += shard.data.nbytes
            if not np.array_equal(np.asarray(shard.data).view(np.uint32), whole[shard.index].view(np.uint32)):
                wrong.append(f"{name} on {shard.device}")
    return num_bytes, most - num_bytes, wrong


def _held(line: str) -> int:
    """Bytes of this process's memory: `VmRSS` now, `VmHWM` at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(one.split()[1]) for one in lines if one.startswith(line))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    arrays = {name: array(name) for name in SHAPES}
    commit(root / "ours", {"arrays": arrays})
    (root / "hub").mkdir()
    for at in range(LAYERS):
        tensors = {f"model.{at}.{name}.weight": np.ascontiguousarray(arrays[name][at].T) for name in ("up", "down")}
        tensors |= {"embed": arrays["table"]} if at == 0 else {}
        safetensors.numpy.save_file(tensors, root / "hub" / f"{at}.safetensors")
    return root


@pytest.fixture(scope="module")
def gang() -> Iterator[LocalGang]:
    with jax_gang(1, 8) as running:
        yield running


# One file of the format of the hub by night: by day are several.
@pytest.mark.parametrize("reader", by_day(READERS, "ours", "layers"))
def test_no_leaf_is_held_twice(saved: Path, gang: LocalGang, reader: str) -> None:
    ((num_bytes, more, wrong),) = gang.run(restored, saved, reader, timeout_seconds=RUN_SECONDS)
    assert (num_bytes, wrong) == (STATE_BYTES, [])
    assert more < 0.75 * LEAF_BYTES, reader  # of which some 30 MB are JAX's own


@pytest.mark.slow
def test_each_process_holds_its_part(saved: Path) -> None:
    with jax_gang(2, 4) as gang:
        for reader in READERS:
            for num_bytes, more, wrong in gang.run(restored, saved, reader, timeout_seconds=RUN_SECONDS):
                assert (num_bytes, wrong) == (STATE_BYTES // 2, [])
                assert more < 0.75 * LEAF_BYTES, reader
