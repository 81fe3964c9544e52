"""Ranks that are forks, as other tests have them: they are what ranks are that begin anew, but for what they import."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from braidax.comm import Communicator
from braidax.errors import PeerLost
from braidax.gang import LocalGang
from tests.support.gang.forks import fork_children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks begin anew")


def told(comm: Communicator) -> dict[str, Any]:
    """Returns what a rank is."""
    import jax

    return {
        "parent": os.getppid(),
        "leads": os.getpgrp() == os.getpid(),
        "folder": str(Path.cwd()),
        "variable": os.environ.get("BRAIDAX_TESTED"),
        "command": Path("/proc/self/cmdline").read_bytes().split(b"\0")[2].decode(),
        "devices": jax.local_device_count(),
        "input": os.read(0, 1),
        "interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }


def die(comm: Communicator) -> None:
    """Ends rank 1 as `kill -9` does."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


@pytest.mark.parametrize("kind", ["forks", pytest.param("anew", marks=pytest.mark.slow)])
def test_ranks_are_what_they_are_told(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"BRAIDAX_TESTED": kind, "JAX_NUM_CPU_DEVICES": "3"}
    if kind == "forks":
        monkeypatch.delenv("BRAIDAX_TESTS_COMPILE", raising=False)
        for name in ("PYTHONBREAKPOINT", "PYTHONHASHSEED", "LD_LIBRARY_PATH"):  # as Ray, Dask and OpenCV do
            monkeypatch.setenv(name, "0")
        fork_children(monkeypatch)
    with LocalGang(2, environment=environment) as gang:
        for rank in gang.run(told):
            assert rank.pop("command") == ("tests.support.gang.forks" if kind == "forks" else rank_code())
            assert rank == {
                "parent": os.getpid(),
                "leads": True,
                "folder": str(tmp_path),
                "variable": kind,
                "devices": 3,
                "input": b"",
                "interrupted": True,
            }
        with pytest.raises(PeerLost, match=r"rank 1 .* ended by signal 9 \(SIGKILL\)"):
            gang.run(die)
        gang.replace()
        gang.run(say)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] here", "[1] here"]


def rank_code() -> str:
    """Returns what a rank runs that begins anew here."""
    from braidax.gang import local

    return local._CODE.replace("PATH", repr(sys.path))  # pyright: ignore[reportPrivateUsage]


def say(comm: Communicator) -> None:
    """Writes a line."""
    print("here")  # noqa: T201
