"""What this machine can do: measured once, kept, and measured anew where what is kept is not of this machine."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from braidax.errors import ArgumentError
from braidax.tune import Calibration, Identity, calibrate
from braidax.tune.calibration import calibrate as calibrating
from braidax.tune.calibration.disks import measure_disk
from braidax.tune.calibration.hosts import measure_cores
from braidax.tune.calibration.rates import Copies, Disk

SMALL = 2 << 20


@pytest.fixture(scope="module", autouse=True)
def for_a_moment() -> Iterator[None]:
    """Lets each measurement take as little time as gives a number: how good it is nobody asks here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("braidax.tune.calibration.disks._SMALL_SECONDS", 0.05)
        patch.setattr("braidax.tune.calibration.hosts._DECODE_SECONDS", 0.05)
        patch.setattr(calibrating, "_NUM_RUNS", 1)
        yield


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2,), ("data",))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def measured(mesh: Mesh, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Calibration, Path, float]:
    folder, begun = tmp_path_factory.mktemp("folder"), time.perf_counter()
    found = calibrate(mesh, folder, cache=cache, max_bytes=SMALL)
    return found, folder, time.perf_counter() - begun


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch, measured: tuple[Calibration, Path, float]) -> list[Path]:
    """The folders that were measured; the rates are those from before, of the present machine."""
    folders: list[Path] = []

    def made(mesh: Mesh, folder: Path, identity: Identity, max_bytes: int, wait_seconds: float) -> Calibration:
        folders.append(folder)
        return replace(measured[0], identity=identity)

    monkeypatch.setattr(calibrating, "_measured", made)
    return folders


def test_rates_are_measured_and_printed(measured: tuple[Calibration, Path, float]) -> None:
    found, folder, seconds = measured
    assert list(folder.iterdir()) == []
    assert seconds < 60  # 20 on a quiet machine
    assert found.identity == Identity.of(jax.make_mesh((2,), ("data",)), folder)
    assert [*found.machine.permutes] == [*found.machine.collectives] == ["data"]
    for rate in (found.copies.to_host, found.copies.to_device, found.copies.in_memory, found.disk.cached):
        assert 1e7 < rate < 1e12
    assert [count for count, _ in found.disk.small_reads] == [1, 4, 16]
    assert found.cores.speedups[0] == (1, 1.0)
    lines = str(found).splitlines()
    heads = ["machine", "a device", "along data", "", "host", "copies", "disk", "small reads", "decoding"]
    assert [line[:13].strip() for line in lines] == heads
    assert max(map(len, lines)) <= 120


def test_it_is_kept_and_read_back(measured: tuple[Calibration, Path, float], mesh: Mesh, cache: Path) -> None:
    found, folder, _ = measured
    assert Calibration.from_json(found.to_json()) == found
    begun = time.perf_counter()
    assert calibrate(mesh, folder, cache=cache) == found
    assert time.perf_counter() - begun < 1
    (file,) = cache.iterdir()
    assert file.name.endswith(".calibration.json")
    assert Calibration.from_json(file.read_text()) == found


def test_it_is_measured_again_if_asked_to(unmeasured: list[Path], measured: Any, mesh: Mesh, cache: Path) -> None:
    calibrate(mesh, measured[1], cache=cache)
    assert unmeasured == []
    calibrate(mesh, measured[1], measure="again", cache=cache)
    assert unmeasured == [measured[1]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text[:-20], "text is no calibration"),
        (lambda text: "[]", "text is no calibration"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "text is of version 2: expected 1"),
        (
            lambda text: text.replace(jax.__version__, "0.0.1"),
            f"jax_version is '0.0.1', here it is '{jax.__version__}'",
        ),
        (lambda text: json.dumps(_with(text, "copies", "to_host", 0)), "to_host=0: expected a positive number"),
        (lambda text: json.dumps(_with(text, "copies", "to_host", "1")), "to_host='1': expected a positive number"),
        (lambda text: json.dumps(_with(text, "disk", "small_reads", [[0, 1.0]])), "small_reads has 0: expected"),
        (lambda text: json.dumps(_with(text, "identity", "processor", 7)), "identity has"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_file_that_is_not_of_this_machine_is_measured_anew(
    unmeasured: list[Path],
    measured: Any,
    mesh: Mesh,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[str], str],
    told: str,
) -> None:
    found, folder, _ = measured
    calibrate(mesh, folder, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(change(file.read_text()))
    with caplog.at_level(logging.WARNING, "braidax"):
        assert calibrate(mesh, folder, cache=tmp_path) == found
    assert unmeasured == [folder, folder]
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    assert told in record.getMessage()
    assert Calibration.from_json(file.read_text()) == found  # it was put right


def _with(text: str, part: str, name: str, value: Any) -> Any:
    tree = json.loads(text)
    tree[part][name] = value
    return tree


def test_other_machines_have_files_of_their_own(unmeasured: list[Path], measured: Any, tmp_path: Path) -> None:
    meshes = [
        jax.make_mesh(shape, names) for shape, names in (((2,), ("data",)), ((2,), ("model",)), ((1,), ("data",)))
    ]
    for mesh in meshes:
        calibrate(mesh, measured[1], cache=tmp_path)
    assert len(unmeasured) == len([*tmp_path.iterdir()]) == 3


def test_a_cache_that_cannot_be_written_is_told_and_does_not_matter(
    unmeasured: list[Path], measured: Any, mesh: Mesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "braidax"):
        assert calibrate(mesh, measured[1], cache=tmp_path / "file") == measured[0]
    assert "cannot be written (File exists): the machine is measured again next time" in caplog.records[-1].getMessage()


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_measured_is_named(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"absent' is no folder: expected one whose disk is to be measured"):
        calibrate(mesh, tmp_path / "absent")
    with pytest.raises(ArgumentError, match=r"measure='twice': expected \"once\" or \"again\""):
        calibrate(mesh, tmp_path, measure="twice")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="max_bytes=7: expected 1 MiB or more"):
        calibrate(mesh, tmp_path, max_bytes=7)
    usage = shutil.disk_usage(tmp_path)._replace(free=3 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    match = r"has 3,145,728 bytes free, and 2,097,152 are written for a moment: expected twice as many free"
    with pytest.raises(ArgumentError, match=match):
        measure_disk(tmp_path, max_bytes=SMALL)
    with pytest.raises(ArgumentError, match="past_cache='perhaps'"):
        Disk(1.0, 1.0, 1.0, ((1, 1.0),), "perhaps")
    with pytest.raises(ArgumentError, match="in_memory=inf: expected a positive number"):
        Copies(1.0, 1.0, float("inf"))


def test_a_disk_that_becomes_full_is_named_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, sizes = os.write, list[int]()

    def full(file: int, content: bytes) -> int:
        if sum(sizes) >= 1 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        sizes.append(write(file, content[: 1 << 19]))
        return sizes[-1]

    monkeypatch.setattr(os, "write", full)
    match = rf"^folder='{tmp_path}' became full \(No space left on device\) before 2,097,152 bytes were written"
    with pytest.raises(ArgumentError, match=match):
        measure_disk(tmp_path, max_bytes=SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory")
def test_a_folder_in_memory_is_said_to_be_in_memory() -> None:
    assert measure_disk(Path("/dev/shm"), max_bytes=SMALL).past_cache == "no"


KILLED = """
import os, signal, sys
from pathlib import Path
from braidax.tune.calibration.disks import measure_disk
fsync = os.fsync
def stopped(file):
    fsync(file)
    os.kill(os.getpid(), signal.SIGKILL)
os.fsync = stopped
measure_disk(Path(sys.argv[1]), max_bytes=2 << 20)
"""


def test_nothing_is_left_behind_by_a_process_that_is_killed(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_threads_are_as_many_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braidax.tune.calibration.hosts.usable_cores", lambda: 3)
    assert [count for count, _ in measure_cores(wait_seconds=60).speedups] == [1, 2, 3]
