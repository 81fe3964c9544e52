"""Steps whose servers `braidax launch --servers` has started: real processes, some of which are killed or stopped."""

import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import braidax.parallel as bx
from braidax.errors import ArgumentError
from braidax.gang.hosts import Host
from braidax.gang.launch import launch_here
from braidax.gang.over_ssh import Remote, launch_over_ssh
from braidax.gang.program import Program
from tests.support.gang import ssh
from tests.support.gang.programs import wait_until_gone
from tests.support.parallel.launched import NUM_STEPS, SAVED, WORKERS
from tests.support.parallel.workers.teams import batches, make_step, on_one_device
from tests.support.tree import ROOT

Launch = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for what processes of these tests compile, each program once. What a killed one was writing is told and
    compiled again."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def launched(compiled: str, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Returns a function that launches a case, and returns the exit code and what was written."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", compiled)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("BRAIDAX_TESTED_FORKS", compiled)

    def run(*case: str, processes: int, servers: int, log: io.StringIO | None = None, **options: Any) -> Any:
        log, restarts = io.StringIO() if log is None else log, options.pop("restarts", 0)
        given: dict[str, Any] = {"initialize": "nothing", "devices_per_process": 1, **options}
        program = Program("tests.support.parallel.launched", case, "module", **given)
        return launch_here(program, processes, servers=servers, restarts=restarts, log=log), log.getvalue()

    return run


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ssh.serve(tmp_path_factory.mktemp("ssh")) as command:
        yield command


@pytest.fixture
def launched_over_ssh(command: str, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """As `launched`, on hosts."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def run(*case: str, hosts: list[Host], restarts: int = 0, initialize: Any = "nothing") -> Any:
        program = Program("tests.support.parallel.launched", case, "module", initialize, devices_per_process=1)
        log, remote = io.StringIO(), Remote(ssh=command)
        return launch_over_ssh(program, hosts, remote=remote, restarts=restarts, log=log), log.getvalue()

    return run


def told(log: str) -> list[dict[str, Any]]:
    """Returns what ranks have told."""
    return [json.loads(line[line.index("{") :]) for line in log.splitlines() if re.match(r"\[\d+( \w+)?\] \{", line)]


def assert_trained(log: str, *, begun: int = 0) -> None:
    """Checks what one rank has told of training from a step on."""
    (found,) = told(log)
    losses, params = on_one_device("adam", batches(NUM_STEPS))
    assert found.get("begun", 0) == begun
    np.testing.assert_allclose(found["losses"], losses[begun:], rtol=1e-5)
    np.testing.assert_allclose(found["words"], params["words"], atol=1e-6)


def assert_trained_by_workers(log: str) -> None:
    """Checks what workers have told who trained twice."""
    found = told(log)
    assert len(found) == 2 * WORKERS
    losses, params = on_one_device("adam", batches(NUM_STEPS), microbatches=WORKERS)
    np.testing.assert_allclose(np.mean([one["losses"] for one in found], axis=0), losses, rtol=1e-5)
    for one in found:
        np.testing.assert_allclose(one["words"], params["words"], atol=1e-6)
        assert "the 2 servers of braidax launch serve another step of this process: expected one" in one["refused"]


@pytest.mark.parametrize(
    ("lost", "processes"),
    [
        pytest.param("server", 1, marks=pytest.mark.slow),  # served/test_losing.py has a gang, tests/gang restarts
        pytest.param("server", 2, marks=pytest.mark.slow),
        pytest.param("server and rank", 2, marks=pytest.mark.slow),  # tests/gang has ranks that die
    ],
)
def test_training_goes_on_from_the_checkpoint_when_a_server_dies_and_when_a_rank_does(
    launched: Launch, tmp_path: Any, lost: str, processes: int
) -> None:
    """On two devices, of one process or of two."""
    restarts = len(lost.split(" and "))
    options: dict[str, Any] = {"initialize": "jax", "devices_per_process": 2 // processes, "restarts": restarts}
    code, log = launched("saved", str(tmp_path), lost, processes=processes, servers=1, **options)
    assert code == 0, log
    died = r"braidax launch: {} \(pid \d+\) failed first: it was ended by signal 9"
    assert re.search(died.format("server 0"), log), log
    assert bool(re.search(died.format("rank 1"), log)) == (lost == "server and rank"), log
    assert_trained(log, begun=SAVED)


@pytest.mark.slow  # below there is one, which is stopped; workers/test_together.py has two
def test_workers_train_one_step_after_the_other(launched: Launch) -> None:
    code, log = launched("workers", processes=WORKERS, servers=2)
    assert code == 0, log
    assert_trained_by_workers(log)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_server_of_whose_rows_there_are_copies_is_replaced(launched: Launch, processes: int) -> None:
    """And then the other one, that has what another process was given in place of the first."""
    code, log = launched("replaced", processes=processes, servers=2, initialize="jax" if processes > 1 else "nothing")
    assert code == 0, log
    for number in (1, 0):
        died = rf"launch: server {number} \(pid \d+\) was ended by signal 9 .*; the program has copies of what it had, "
        assert re.search(died + "and goes on; starts another one", log), log
    assert "another process has taken the place of server 1" in log
    assert_trained(log)


BESIDE = [Host("a", (0,), num_servers=1), Host("b", num_servers=1, sees_all=True)]
_SERVERS = """
import os, time
from pathlib import Path
wanted, found = f"BRAIDAX_JOB={os.environ['BRAIDAX_JOB']}", set()
while len(found) < int(os.environ["BRAIDAX_SERVERS"]):
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            told = environ.read_text(errors="replace").split(chr(0))
        except OSError:
            continue
        found |= {one for one in told if one.startswith("BRAIDAX_SERVER=") and wanted in told}
    time.sleep(0.02)
print(*sorted(found), flush=True)
"""


def test_hosts_start_servers_beside_ranks_and_alone(
    command: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(_SERVERS)
    log, program = io.StringIO(), Program("program.py", initialize="nothing")
    code = launch_over_ssh(program, BESIDE, remote=Remote(ssh=command), log=log)
    assert code == 0, log.getvalue()
    *told, idle = log.getvalue().splitlines()
    assert sorted(told) == [f"[{rank}] BRAIDAX_SERVER=0 BRAIDAX_SERVER=1" for rank in ("0 a", "1 b")]
    assert "no step of it has met its 2 servers: give one strategies" in idle


@pytest.mark.slow  # above they are started
def test_hosts_have_servers_beside_ranks_and_alone(launched_over_ssh: Launch) -> None:
    code, log = launched_over_ssh("workers", hosts=BESIDE)
    assert code == 0, log
    assert_trained_by_workers(log)


@pytest.mark.slow
def test_a_server_of_a_host_dies_and_then_a_rank(launched_over_ssh: Launch, tmp_path: Any) -> None:
    hosts = [Host("a", (0, 1)), Host("b", num_servers=1)]
    code, log = launched_over_ssh("saved", str(tmp_path), "server and rank", hosts=hosts, restarts=2, initialize="jax")
    assert code == 0, log
    died = r"braidax launch: {} pid \d+\) failed first: it was ended by signal 9"
    assert re.search(died.format(r"server 0 \(host b,"), log), log
    assert re.search(died.format(r"rank 1 \(host a,"), log), log
    assert_trained(log, begun=SAVED)


@pytest.mark.slow
def test_a_server_of_a_host_of_whose_rows_there_are_copies_may_die(launched_over_ssh: Launch) -> None:
    code, log = launched_over_ssh("copies", hosts=[Host("a"), Host("b", num_servers=2)])
    assert code == 0, log
    assert re.search(r"launch: server 1 \(host b, pid \d+\) was ended by signal 9 .*; the program has copies", log)
    assert "are not replaced: braidax launch starts no other server on --hosts; give the step one that is spare" in log
    assert_trained(log)


class Interrupting(io.StringIO):
    """Presses Ctrl-C once the program is ready."""

    def write(self, text: str) -> int:
        if "pids" in text:
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_servers_outlive_ctrl_c_until_ranks_have_ended(launched: Launch) -> None:
    log = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        launched("stopped", processes=1, servers=1, log=log)
    found = told(log.getvalue())
    assert "the 1 servers of braidax launch serve another step of this process: expected one" in found[0]["refused"]
    assert found[1] == {"bias": 0.0}
    wait_until_gone(found[0]["pids"], seconds=0.1)
    assert "had to kill" not in log.getvalue()


@pytest.mark.parametrize(
    ("strategy", "processes", "message"),
    [
        (
            bx.Hybrid(tables="servers"),
            1,
            r"process_count\(\) is 1, and braidax launch has started 3 .*: expected one JA",
        ),
        (bx.ParameterServers(), 2, "process_count.. is 2, .* which braidax launch does with --initialize nothing"),
    ],
)
def test_processes_that_do_not_fit_are_refused(
    strategy: Any, processes: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRAIDAX_SERVERS", "2")
    monkeypatch.setenv("BRAIDAX_SIZE", "3")
    if processes > 1:
        monkeypatch.setattr(jax, "process_count", lambda: processes)
    with pytest.raises(ArgumentError, match=message):
        make_step(None, strategy)
