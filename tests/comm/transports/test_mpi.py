"""What is MPI's alone: the launcher, the thread level, addresses that do not fit, and what is left behind."""

import subprocess
import sys

import pytest

from braidax.comm.transports.mpi import MpiTransport
from braidax.errors import MissingExtra
from tests.support.comm.transports.worlds import run_mpi


@pytest.fixture(scope="module")
def done() -> "subprocess.CompletedProcess[str]":
    """What two ranks print that leave nothing behind, and then refuse four worlds."""
    return run_mpi(2, "leave", "then", "refuse", "0,0", "0,x", "0,1,2", "1,0")


def test_nothing_is_left_after_close(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.stdout.count("nothing left") == 2, done.stdout
    assert done.returncode == 0


def test_several_threads_must_be_allowed() -> None:
    done = run_mpi(1, "refuse", "0", environment={"MPI4PY_RC_THREAD_LEVEL": "single"})
    assert "HandshakeError MPI was initialized with thread level 0; expected at least 2" in done.stdout, done.stdout
    assert "mpi4py.rc.thread_level" in done.stdout
    assert done.returncode == 0


def test_a_world_that_does_not_fit_is_refused(done: "subprocess.CompletedProcess[str]") -> None:
    for words in (
        "the ranks of the world have the MPI ranks ['0', '0']; expected each of 0 to 1 once",
        "the ranks of the world have the MPI ranks ['0', 'x']; expected each of 0 to 1 once",
        "the world has 3 ranks, the MPI communicator 2; expected the same: start mpiexec -n 3",
        "rank 1 (host host-1) has the MPI rank 0 in this world, 1 in MPI; expected the same",
    ):
        assert f"HandshakeError {words}" in done.stdout, done.stdout
    assert done.returncode == 0


def test_all_operations_end_when_mpi_fails() -> None:
    done = run_mpi(1, "break")
    assert done.stdout.count("CommError MPI failed at rank 0 (host host-0): MPI_ERR_RANK") == 5, done.stdout
    assert done.returncode == 0


def test_a_rank_that_fails_ends_all() -> None:
    done = run_mpi(2, "fail", limit_seconds=60)
    assert "AssertionError: rank 1 fails" in done.stdout, done.stdout
    assert done.returncode not in (0, 124), done.stdout


def test_mpi4py_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(MissingExtra, match=r'the transport "mpi" needs the module .* pip install "braidax\[mpi\]"'):
        MpiTransport()
