"""The peers do the work that they are compared for."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.checkfreq.floor import BUFFERED, DIRECT, Floor
from benchmarks.comm import comparing
from benchmarks.comm.worlds import DEFAULT, MPI, MPI_TCP, TCP
from benchmarks.harness import Report, arguments
from benchmarks.naive import loops


def _report() -> Report:
    return Report(arguments("comm", "Messages.").parse_args([]))


@pytest.mark.parametrize("library", [loops.by_pillow, loops.by_opencv])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_loop_gives_each_image_once_an_epoch_resized(library: Callable[[], loops.Resize], threads: int) -> None:
    resize = library()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), np.uint8)
    images = loops.Images(pixels, np.arange(12, dtype=np.int32))
    batches = loops.host_batches(images, resize, (16, 16), 4, threads)
    seen: list[int] = []
    for _ in range(3):
        batch = next(batches)
        assert batch["image"].shape == (4, 16, 16, 3)
        for image, label in zip(batch["image"], batch["label"], strict=True):
            np.testing.assert_array_equal(image, resize(pixels[label], (16, 16)))
        seen += batch["label"].tolist()
    batches.close()
    assert sorted(seen) == list(range(12))


def test_what_is_put_by_shardings_lies_where_the_step_wants_it() -> None:
    sharding = NamedSharding(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]), PartitionSpec("data"))
    images = loops.Images(np.zeros((8, 4, 4), np.uint8), np.arange(8, dtype=np.int32))
    batches = loops.to_shardings(loops.host_batches(images, loops.by_opencv(), (4, 4), 8, 1), sharding)
    batch = next(batches)
    batches.close()
    assert batch["image"].sharding == sharding
    assert sorted(batch["label"].tolist()) == list(range(8))


def test_both_floors_write_the_same_bytes(tmp_path: Path) -> None:
    leaves = [jax.numpy.arange(3000, dtype=jax.numpy.float32), jax.numpy.ones((7,), jax.numpy.int8)]
    expected = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
    with Floor(leaves, tmp_path / "floor") as floor:
        why = floor.why_not_direct()
        for name, write in floor.writes().items():
            if name == BUFFERED or not why:
                floor.forget()
                write()
                assert (tmp_path / "floor").read_bytes() == expected, name
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_direct_writes_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with Floor([jax.numpy.ones(3)], tmp_path / "floor") as floor:
        assert floor.why_not_direct() == "no direct writes here (Invalid argument)"
        assert DIRECT in floor.writes()


def test_without_mpirun_what_it_starts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "launcher", lambda: None)
    found = _report()
    assert comparing.present(found, "messages", {TCP: 1, DEFAULT: 2, MPI: 3, MPI_TCP: 4}) == {TCP: 1, DEFAULT: 2}
    assert found.notes == [
        "mpi4py is missing: no mpirun beside Python or on PATH",
        "mpi4py, tcp is missing: no mpirun beside Python or on PATH",
    ]


def test_a_way_is_compared_with_those_that_take_the_same() -> None:
    found = _report()
    times = {"ours tcp": 10, "gloo": 20, "mpi4py, tcp": 5, "ours ucx": 2, "mpi4py": 1}
    times |= {"ours ucx, tcp": 10, "ours default": 4}
    for at in ("8 B", "16 MiB"):
        for system, value in times.items():
            found.add("all_reduce", system, "time", "us", [value], at=at)
    comparing.claim_ways(found, "all_reduce", "all_reduce", "time", comparing.WAYS)
    assert {claim.name: (claim.worst.peer, claim.value) for claim in found.claims} == {
        "all_reduce_tcp": ("mpi4py, tcp", 0.5),
        "all_reduce_ucx_tcp": ("mpi4py, tcp", 0.5),
        "all_reduce_shared": ("mpi4py", 0.5),
        "all_reduce_default": ("mpi4py", 0.25),
    }
    found.claims.clear()
    comparing.claim_messages(found, "all_reduce", "m", "time", [8, 16 << 20])
    shared = {claim.name: (claim.target, claim.holds) for claim in found.claims if claim.ours == "ours ucx"}
    assert shared == {"m_shared_small": (">= 0.5", True), "m_shared_large": (">= 0.9", False)}
    assert [comparing.named(size) for size in (8, 1 << 13, 1 << 24, 1 << 30)] == ["8 B", "8 KiB", "16 MiB", "1 GiB"]
