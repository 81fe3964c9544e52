"""Rows on disk, of which memory has some: they are what NumPy has, and those that are used often stay."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braidax.errors import ArgumentError
from braidax.parallel.given.initial import Born
from braidax.parallel.rows import row_adagrad, row_optimizer
from braidax.parallel.served import row_memory
from braidax.parallel.served.files import disk_rows, row_files
from braidax.parallel.served.files.disk_rows import DiskRows, OnDisk, disk_bytes, record_bytes, shares
from braidax.parallel.served.on_servers.shard import Shard
from braidax.parallel.served.programs import TableForm, rules_of_own, table_form
from braidax.parallel.served.wire import packed
from braidax.program import trace
from tests.support.comm.ranks import by_day
from tests.support.parallel.served.server import made

PAGE = 4096
FRAMES = 64
FORMS = [((60,), np.dtype(np.float32)), ((), np.dtype(np.float32)), ((2, 3), np.dtype(jnp.bfloat16))]  # 256 bytes
WIDE = [((1500,), np.dtype(np.float32))]
OPTIMIZERS = {
    "sgd": row_optimizer(optax.sgd(0.5)),
    "adagrad": row_optimizer(optax.adagrad(0.5)),
    "momentum": row_optimizer(optax.sgd(0.1, 0.9)),
    "adam": row_optimizer(optax.adam(0.1)),
    "row_adagrad": row_adagrad(0.1),
}


def opened(folder: Path, num_rows: int, forms: Any, frames: int = FRAMES) -> DiskRows:
    size = disk_bytes(1, forms)
    return DiskRows(OnDisk(str(folder), frames * size + size // 2), num_rows, forms, "rows")


def random_leaves(random: Any, count: int, forms: Any) -> list[Any]:
    return [random.integers(-99, 99, (count, *shape)).astype(dtype) for shape, dtype in forms]


def assert_same(one: Any, two: Any) -> None:
    for mine, other in zip(one, two, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.fixture(params=["C", "NumPy"])
def made_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "NumPy":
        for module in (row_memory, row_files):
            monkeypatch.setattr(module, "compiled", lambda: None)
    return request.param


@pytest.mark.parametrize(
    ("made_by", "forms", "num_rows"),
    [
        pytest.param(name, forms, num_rows, marks=pytest.mark.slow if name == "NumPy" and forms is WIDE else ())
        for name in ("C", "NumPy")
        for forms, num_rows in ((FORMS, 4000), (WIDE, 700), (FORMS, 30), (FORMS, 0))
    ],
    indirect=["made_by"],
)
@pytest.mark.usefixtures("made_by")
def test_rows_are_those_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forms: Any, num_rows: int) -> None:
    """Put by their ids, and in their order, with steps, where a block is in memory and where it is not."""
    monkeypatch.setattr(disk_rows, "_SPAN_BYTES", 5 * PAGE)
    random, rows = np.random.default_rng(0), opened(tmp_path, num_rows, forms)
    expected = [np.zeros((num_rows, *shape), dtype) for shape, dtype in forms]
    assert_same(rows.lying(slice(None)), expected)
    for turn in range(40):
        ids = random.permutation(num_rows)[: int(random.integers(0, 300))]
        if turn % 2:
            ids = np.sort(ids // 7)  # blocks that come again and again
            ids = np.unique(ids)
        for part in rows.portions(len(ids)):
            some = ids[part]
            rows.bring(some)
            if turn % 3:
                rows.count(some)
            found = [np.empty((len(some), *shape), dtype) for shape, dtype in forms]
            rows.take(some, found)
            assert_same(found, [leaf[some] for leaf in expected])
            new = random_leaves(random, len(some), forms)
            rows.put(some, new)
            for leaf, one in zip(expected, new, strict=True):
                leaf[some] = one
        start, stop = sorted(int(one) for one in random.integers(0, num_rows + 1, 2))
        where = slice(start, stop, int(random.integers(1, 4)))
        assert_same(rows.lying(where), [leaf[where] for leaf in expected])
        if turn % 4 == 0:
            new = random_leaves(random, len(range(*where.indices(num_rows))), forms)
            rows.lay(where, new)
            for leaf, one in zip(expected, new, strict=True):
                leaf[where] = one
    assert_same(rows.lying(slice(None)), expected)
    if num_rows * record_bytes(forms) > FRAMES * PAGE:
        assert rows.num_written > 100
    rows.close()
    rows.close()
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_are_read_often_stay_and_are_not_written(tmp_path: Path) -> None:
    """While others come once: many times as many as there is room for."""
    rows, num_rows = opened(tmp_path, 64_000, FORMS), 64_000
    hot = np.arange(0, 16 * 30, 16)  # of 30 blocks, where there is room for 64
    cold = np.random.default_rng(0).permutation(np.arange(16 * 64, num_rows, 16))[:600]
    for at in range(0, len(cold), 10):
        for ids in (hot, cold[at : at + 10]):
            rows.bring(ids)
            rows.count(ids)
            leaves = [np.empty((len(ids), *shape), dtype) for shape, dtype in FORMS]
            rows.take(ids, leaves)
            rows.put(ids, leaves)
    assert rows.num_read == len(hot) + len(cold)
    assert len(cold) - FRAMES <= rows.num_written <= len(cold) + len(hot)
    rows.close()


def test_what_is_read_ahead_stays_until_it_is_changed(tmp_path: Path) -> None:
    """Though it was read once, and all that is there was more often."""
    rows = opened(tmp_path, 64_000, FORMS)
    leaves = [np.zeros((4, *shape), dtype) for shape, dtype in FORMS]
    batches = [np.arange(16 * 4 * at, 16 * 4 * (at + 1), 16) for at in range(150)]
    for ids in batches[:16] * 5:
        rows.bring(ids)
        rows.count(ids)
        rows.put(ids, leaves)
    before = rows.num_read
    for at in range(16, 150):
        rows.bring(batches[at])
        rows.count(batches[at])
        if at >= 16 + 6:  # six batches behind, of four blocks each
            rows.bring(batches[at - 6])
            rows.put(batches[at - 6], leaves)
    assert rows.num_read - before == 4 * (150 - 16)
    rows.close()


def big_form(optimizer: Any, num_rows: int) -> TableForm:
    born = trace(lambda key: Born({"table": jax.random.normal(key, (num_rows, 64))}, {}, key), jax.random.key(0))
    return table_form("table", jax.ShapeDtypeStruct((num_rows, 64), np.float32), born, rules_of_own(optimizer))


@pytest.mark.parametrize("optimizer", by_day(OPTIMIZERS, "momentum", "row_adagrad"))
def test_a_shard_with_little_memory_is_that_of_memory(tmp_path: Path, optimizer: str) -> None:
    """To the bit: what is pulled, what was moved, what lies there, and rows that are put."""
    form, random = big_form(OPTIMIZERS[optimizer], 3000), np.random.default_rng(0)
    size = disk_bytes(1, form.of_row)
    assert disk_bytes(1500, form.of_row) > 80 * size
    shards = [Shard(form, 1, 2), Shard(form, 1, 2, disk=OnDisk(str(tmp_path), FRAMES * size))]
    for shard in shards:
        shard.bear(np.asarray(jax.random.key_data(jax.random.key(4))))
    ids = np.empty(0, np.int64)
    for step in range(6):
        ids = np.unique(random.integers(0, 1500, 400))
        gradients = random.normal(size=(len(ids), 64)).astype(np.float32)
        assert_same(*([shard.pull(ids)] for shard in shards))
        for shard in shards:
            shard.push(ids, gradients, [], step)
    assert_same(*([*shard.changed(5, 0, 1000)[:1], shard.moved_since(ids, 4)] for shard in shards))
    rows = slice(3, 900, 2)
    for shard in shards:
        shard.lay(slice(0, 449), [leaf.copy() for leaf in shard.lying(rows)])
        values, *kept, _ = shard.lying(slice(1000, 1100))
        shard.put(200, values, kept)
        shard.put_at(np.arange(5, 1400, 7), [leaf.copy() for leaf in shard.lying(slice(500, 700))[:-1]])
        shard.settle_all(shard.shared)
    assert_same(*(shard.lying(slice(None)) for shard in shards))
    assert shards[0].row_bytes == shards[1].row_bytes
    for shard in shards:
        shard.close()


@pytest.mark.usefixtures("made_by")
def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    """What is lost is not read as zeros, nor is anything behind it."""
    rows = opened(tmp_path, 64_000, FORMS)
    os.truncate(rows._file._file.fileno(), 100 * PAGE)
    words = r"disk='.*' of Served, on .*, for rows: rows were not read or written \(.*\), and some are lost; give a"
    with pytest.raises(OSError, match=words) as caught:
        rows.bring(np.array([64_000 - 1]))
    assert caught.value.errno == errno.ENODATA
    for call in (lambda: rows.bring(np.array([0])), lambda: rows.lying(slice(0, 1))):
        with pytest.raises(OSError, match="some are lost"):
            call()
    rows.close()


def test_memory_that_is_too_little(tmp_path: Path) -> None:
    words = r"memory_bytes of Served has 200,000 bytes of it for rows, which is room for 48 blocks of 4,096 bytes: "
    with pytest.raises(ArgumentError, match=words + "expected 64 at least"):
        DiskRows(OnDisk(str(tmp_path), 200_000), 64_000, FORMS, "rows")
    DiskRows(OnDisk(str(tmp_path), 200_000), 48 * 16, FORMS, "rows").close()  # which all fit


def test_a_message_that_has_no_disk() -> None:
    for wrong in ("rows", ["rows"], ["rows", "many"], [3, 4]):
        with pytest.raises(ArgumentError, match=r"disk=.*: expected a folder, and the bytes of memory for some"):
            made().handle(9, packed("make", {"tables": [], "run": "this", "disk": wrong}))


@pytest.mark.parametrize(
    ("memory", "sizes", "expected"),
    [(100, [10, 80, 80], [10, 45, 45]), (100, [80, 10], [80, 10]), (99, [98, 98], [49, 50]), (5, [], [])],
)
def test_memory_is_shared_out(memory: int, sizes: list[int], expected: list[int]) -> None:
    assert shares(memory, sizes) == expected


@pytest.mark.parametrize(
    ("width", "rows", "pages"), [(512, 8, 1), (4096, 1, 1), (520, 7, 1), (2052, 3, 2), (5000, 2, 3), (4, 1024, 1)]
)
def test_rows_waste_little_of_a_block(width: int, rows: int, pages: int) -> None:
    forms = [((width,), np.dtype(np.uint8))]
    assert disk_bytes(rows, forms) == pages * PAGE
    assert disk_bytes(rows + 1, forms) == 2 * pages * PAGE


# A server's part that trains until it is killed.
_CHILD = """
import sys
import numpy as np
from braidax.parallel.served.files.disk_rows import DiskRows, OnDisk
forms = [((16,), np.dtype(np.float32))]
rows = DiskRows(OnDisk(sys.argv[1], 1 << 20), 1 << 20, forms, "rows")
print("ready", flush=True)
while True:
    ids = np.unique(np.random.randint(0, 1 << 20, 50))
    rows.bring(ids)
    rows.put(ids, [np.ones((len(ids), 16), np.float32)])
"""


def test_a_killed_server_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert list(tmp_path.iterdir()) == []
        assert any(str(tmp_path) in str(one.readlink()) for one in Path(f"/proc/{child.pid}/fd").iterdir())
        child.kill()
        child.wait()
    assert list(tmp_path.iterdir()) == []
