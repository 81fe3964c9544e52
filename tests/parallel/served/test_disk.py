"""Tables on the disks of servers: the numbers are those of memory, and nothing is left in the folder."""

import errno
import itertools
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braidax.parallel as bx
from braidax.checkpoint import Checkpointer, Every
from braidax.errors import ArgumentError, CallFailed
from braidax.gang import LocalGang
from braidax.parallel.rows import row_adagrad
from braidax.parallel.served.files.disk_rows import OnDisk
from braidax.parallel.served.files.row_files import BlockFile
from braidax.parallel.served.on_servers.shard import Shard
from tests.support.parallel.hybrid import init, make_batch, pooled
from tests.support.parallel.models import copied, make_mesh, specs
from tests.support.parallel.served.server import OPTIMIZERS, ROWS, WIDTH, form_of

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (optax.adam(1e-2), {}),
    "row_adagrad": (optax.sgd(0.1), {"row_optimizers": {"params/table": row_adagrad(0.1)}}),
}


def make_step(case: str, gang: LocalGang, disk: str | None) -> Any:
    optimizer, options = CASES[case]
    strategies = {"data": bx.Hybrid(tables=bx.Served(disk=disk), **options)}
    mesh, batch = make_mesh("8 explicit"), specs(make_batch())
    return bx.parallelize(pooled, optimizer, mesh, strategies, init=init, batch=batch, servers=gang)


def numbers(step: Any, state: bx.State) -> list[Any]:
    """Returns all that training has come to: parameters, tables, and what the optimizer keeps of rows."""
    read = [step._servers.whole.read(name, 0, form.shape[0]) for name, form in step._forms.items()]
    return jax.tree.leaves((copied(state.params), copied(state.opt_state), [(one.values, one.kept) for one in read]))


def assert_same(one: Any, two: Any) -> None:
    for mine, other in zip(one, two, strict=True):
        np.testing.assert_array_equal(mine, other)


def trained(gang: LocalGang, case: str, places: list[str | None], saved: Path) -> list[Any]:
    """Trains two updates in each of some places, from checkpoint to checkpoint where the place changes."""
    found, seeds = list[Any](), iter(range(2 * len(places)))
    for place, same in itertools.groupby(places):
        with make_step(case, gang, place) as step, Checkpointer(saved, Every(1)) as saver:
            assert ("on disk" in str(step.plan)) is (place is not None)
            state = step.init(jax.random.key(1))
            state = saver.restore((step.state_specs, step.tables))[0] if found else state
            for _ in same:
                for seed in itertools.islice(seeds, 2):
                    state, metrics = step.update(state, make_batch(seed))
                    found.append(float(metrics["loss"]))
                step.finish()
                found += numbers(step, state)
            saver.save((state, step.tables))
    return found


@pytest.mark.parametrize("case", [pytest.param("adam", marks=pytest.mark.slow), "row_adagrad"])
def test_training_is_that_of_memory_and_checkpoints_fit_both(
    gangs: dict[int, LocalGang], tmp_path: Path, case: str
) -> None:
    """All in memory, and from the disk to memory and back."""
    disk = tmp_path / "disk"
    disk.mkdir()
    expected = trained(gangs[2], case, [None, None, None], tmp_path / "memory")
    assert_same(trained(gangs[2], case, [str(disk), None, str(disk)], tmp_path / "both"), expected)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_of_a_shard_are_those_of_memory(tmp_path: Path, optimizer: str) -> None:
    form, random = form_of(OPTIMIZERS[optimizer]), np.random.default_rng(0)
    shards = [Shard(form, 1, 2), Shard(form, 1, 2, disk=OnDisk(str(tmp_path), 1 << 20))]
    key = np.asarray(jax.random.key_data(jax.random.key(4)))
    for shard in shards:
        shard.bear(key)
    for step in range(4):
        ids = np.unique(random.integers(0, ROWS // 2, 3))
        gradients = random.normal(size=(len(ids), WIDTH)).astype(np.float32)
        for shard in shards:
            shard.push(ids, gradients, [], step)
    for shard in shards:
        shard.settle_all(shard.shared)
    one, two = (shard.lying(slice(None)) for shard in shards)
    assert_same(one, two)
    for shard in shards:
        shard.close()
        shard.close()
        assert shard.num_rows == len(shard.values) == len(shard.touched) == 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"disk='.*none' of Served, on .*, for rows: expected a folder.*; make it"):
        BlockFile(str(tmp_path / "none"), 3, 4096, "rows")
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"in which this process may write, got: .*Not a directory"):
        BlockFile(str(tmp_path / "file"), 3, 4096, "rows")


def test_a_folder_that_cannot_be_written_to() -> None:
    with pytest.raises(ArgumentError, match=r"disk='/proc' of Served.*in which this process may write"):
        BlockFile("/proc", 3, 4096, "rows")


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others have taken what was free a moment ago."""
    with pytest.raises(OSError, match=r"rows: 1,125,899,906,842,624 bytes are needed, and [\d,]+ are free") as caught:
        BlockFile(str(tmp_path), 1 << 38, 4096, "rows")
    assert caught.value.errno == errno.ENOSPC

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"\(No space left on device\); give more servers, or a folder on a larger disk"):
        BlockFile(str(tmp_path), 3, 4096, "rows")
    assert list(tmp_path.iterdir()) == []


def test_parallelize_says_what_a_server_lacks_and_the_gang_goes_on(gangs: dict[int, LocalGang], tmp_path: Path) -> None:
    def huge(key: jax.Array) -> Any:
        return {**init(key), "other": jnp.zeros((1 << 30, 1 << 20))}

    def squared(params: Any, batch: Any) -> Any:
        return jnp.square(params["other"][batch["ids"]]).mean()

    gang, disk = gangs[1], str(tmp_path)
    words = rf"OSError.*disk='{re.escape(disk)}'.*for other, float32\[1073741824, 1048576\], part 0 of 1: "
    with pytest.raises(CallFailed, match=words + r"[\d,]+ bytes are needed, and [\d,]+ are free"):
        bx.parallelize(
            squared,
            CASES["adam"][0],
            make_mesh("8 explicit"),
            {"data": bx.Hybrid(tables=bx.Served(disk=disk))},
            init=huge,
            batch=specs(make_batch()),
            servers=gang,
        )
    with pytest.raises(CallFailed, match=r"ArgumentError.*expected a folder.*make it on the host of each server"):
        make_step("adam", gang, str(tmp_path / "none"))
    with make_step("adam", gang, disk) as step:
        assert int(step.init(jax.random.key(0)).step) == 0


@pytest.mark.parametrize("disk", ["", 3, Path("rows")])
def test_what_is_no_path(disk: Any, unchecked: None) -> None:
    with pytest.raises(ArgumentError, match=r"disk=.*: expected the path of a folder, a text, or None for memory"):
        bx.Served(disk=disk)


@pytest.mark.parametrize("memory_bytes", [0, -1, (1 << 20) - 1])
def test_memory_that_is_none(memory_bytes: int) -> None:
    with pytest.raises(ArgumentError, match=r"memory_bytes=.*: expected a number of bytes for rows on disk, 1,048,576"):
        bx.Served(disk="rows", memory_bytes=memory_bytes)
