"""Launching over ssh, through a real sshd: who runs where, what is told of failures, and that nothing is left there."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from braidax.errors import ArgumentError, GangError
from braidax.gang.hosts import Host
from braidax.gang.over_ssh import Remote, launch_over_ssh
from braidax.gang.program import Program
from tests.support.gang import ssh
from tests.support.gang.launched import INTERRUPTED, JOIN, SAVE, STOPS
from tests.support.gang.programs import wait_until_gone

HOSTS = [Host("a", (4, 7)), Host("b")]

Launch = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ssh.serve(tmp_path_factory.mktemp("ssh")) as command:
        yield command


@pytest.fixture
def run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Returns a function that launches the text of a script on both hosts, and returns exit code and lines."""
    monkeypatch.chdir(tmp_path)

    def run_script(text: str, **options: Any) -> tuple[int, list[str]]:
        Path("program.py").write_text(JOIN + dedent(text))
        log = io.StringIO()
        program = Program("program.py", ("an argument; with a semicolon",), initialize="nothing")
        try:
            code = launch_over_ssh(program, HOSTS, remote=Remote(ssh=command), log=log, **options)
        except KeyboardInterrupt:
            code = INTERRUPTED
        return code, log.getvalue().splitlines()

    return run_script


def test_a_process_runs_for_each_device_or_host(run: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_COLOR", "blue")
    monkeypatch.setenv("BRAIDAX_RANK", "17")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    code, lines = run("""
        place = [os.environ[f"BRAIDAX_LOCAL_{name}"] for name in ("RANK", "SIZE")]
        print(comm.rank, comm.size, *place, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["BRAIDAX_COLOR"])
        print(os.getcwd(), *sys.argv)
        comm.close()
        """)
    assert code == 0
    assert set(lines) == {
        "[0 a] 0 3 0 2 4 blue",
        "[1 a] 1 3 1 2 7 blue",
        "[2 b] 2 3 0 1 None blue",
        *(f"[{where}] {tmp_path} program.py an argument; with a semicolon" for where in ("0 a", "1 a", "2 b")),
    }


def test_secrets_are_on_no_command_line(run: Launch) -> None:
    code, lines = run("""
        import glob
        found = 0
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                found += os.environ["BRAIDAX_SECRET"].encode() in open(path, "rb").read()
            except OSError:
                pass
        print(found)
        comm.close()
        """)
    assert (code, sorted(lines)) == (0, ["[0 a] 0", "[1 a] 0", "[2 b] 0"])


def test_the_rank_that_failed_is_named_and_all_are_ended(run: Launch) -> None:
    code, lines = run("""
        print("pid", os.getpid())
        with comm:
            comm.barrier()
            if comm.rank == 1:
                raise ValueError("the value")
            if comm.rank == 2:
                time.sleep(600)
            comm.barrier()
        """)
    assert code == 1
    (told,) = (line for line in lines if line.startswith("braidax launch: "))
    assert re.fullmatch(
        r"braidax launch: rank 1 \(host a, pid \d+\) failed first: it ended with exit status 1; the last lines that it "
        "wrote:",
        told,
    )
    assert lines[-1] == "ValueError: the value"
    pids = [int(line.split()[-1]) for line in lines if re.match(r"\[\d \w\] pid", line)]
    assert len(pids) == 3
    wait_until_gone(pids, seconds=5)


def test_all_start_again_after_a_rank_was_killed(run: Launch) -> None:
    code, lines = run(
        """
        print("generation", os.environ["BRAIDAX_GENERATION"])
        comm.barrier()
        if comm.rank == 2 and os.environ["BRAIDAX_GENERATION"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
        comm.close()
        """,
        restarts=1,
    )
    assert code == 0
    assert re.search(r"rank 2 \(host b, pid \d+\) failed first: it was ended by signal 9 \(SIGKILL\)", "\n".join(lines))
    assert {"[0 a] generation 1", "[1 a] generation 1", "[2 b] generation 1"} < set(lines)


def test_a_host_whose_connection_ends_is_named_and_its_ranks_end(run: Launch) -> None:
    code, lines = run("""
        print("pid", os.getpid())
        comm.barrier()
        if comm.rank == 2:
            parent = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]
            os.kill(int(parent), signal.SIGKILL)
        time.sleep(600)
        """)
    assert code == 255
    assert any(
        line.startswith("braidax launch: host b failed first: it ended with exit status 255 as ssh says")
        for line in lines
    )
    wait_until_gone([int(line.split()[-1]) for line in lines if "] pid " in line], seconds=10)


@pytest.mark.parametrize(("grace_seconds", "saves"), [(30.0, True), pytest.param(0.1, False, marks=pytest.mark.slow)])
def test_ranks_have_time_to_save_when_all_are_stopped(
    run: Launch, monkeypatch: pytest.MonkeyPatch, grace_seconds: float, saves: bool
) -> None:
    monkeypatch.setenv("BRAIDAX_LAUNCHER", str(os.getpid()))
    stop = "ready()\nif comm.rank == 2:\n    os.kill(int(os.environ['BRAIDAX_LAUNCHER']), signal.SIGINT)\n"
    code, lines = run(SAVE + stop + "time.sleep(600)\n", grace_seconds=grace_seconds)
    assert code == INTERRUPTED
    assert STOPS.format(f"{grace_seconds:g}") in lines
    saved = {line for line in lines if "saved" in line}
    assert saved == ({"[0 a] saved", "[1 a] saved", "[2 b] saved"} if saves else set())
    assert ("braidax launch: had to kill ranks that did not end: 0, 1, 2" in lines) == (not saves)


@pytest.mark.slow
def test_a_second_interrupt_ends_all_at_once(run: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_LAUNCHER", str(os.getpid()))
    code, lines = run(
        """
        print("pid", os.getpid())

        def interrupt(*_):
            if comm.rank == 2:
                os.kill(int(os.environ["BRAIDAX_LAUNCHER"]), signal.SIGINT)

        signal.signal(signal.SIGTERM, interrupt)
        comm.barrier()
        interrupt()
        while True:
            time.sleep(600)
        """,
        grace_seconds=10_000.0,
    )
    assert code == INTERRUPTED
    wait_until_gone([int(line.split()[-1]) for line in lines if "] pid " in line], seconds=10)


def test_the_ranks_of_a_host_that_goes_down_have_time_to_save(run: Launch) -> None:
    slower = SAVE.replace("0.3", "0.3 + comm.rank")  # than the one whose end is reported first
    code, lines = run(
        slower.replace("_exit(0)", "_exit(143)")
        + dedent("""
        ready()
        if comm.rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
        """)
    )
    assert code == 143
    assert {"[0 a] saved", "[1 a] saved"} <= set(lines)
    assert any(re.match(r"braidax launch: rank 0 \(host a, pid \d+\) failed first", line) for line in lines)


def test_ranks_end_with_a_launching_process_that_is_killed(command: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a: 0,1\nb\n")
    (tmp_path / "program.py").write_text(JOIN + "print('pid', os.getpid())\ntime.sleep(600)\n")
    arguments = ["launch", "--hosts", "hosts", "--initialize", "nothing", "program.py"]
    with subprocess.Popen(
        [sys.executable, "-m", "braidax.cli", *arguments],
        cwd=tmp_path,
        env={**os.environ, "BRAIDAX_SSH": command},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(3)]
        process.kill()
    wait_until_gone(pids, seconds=10)


def test_a_host_that_does_not_answer_is_named_with_the_words_of_ssh(command: str, tmp_path: Path) -> None:
    log = io.StringIO()
    remote = Remote(ssh=f"{command} -p 1")
    code = launch_over_ssh(Program("x.py", initialize="nothing"), [Host("a")], remote=remote, log=log)
    assert code == 255
    assert "[a] ssh: connect to host 127.0.0.1 port 1: Connection refused" in log.getvalue()
    assert "host a failed first: it ended with exit status 255 as ssh says" in log.getvalue()


def test_a_command_that_cannot_be_is_told() -> None:
    def launch(**options: str) -> None:
        launch_over_ssh(Program("x.py", initialize="nothing"), [Host("a")], remote=Remote(**options))

    with pytest.raises(GangError, match="ssh='not-a-program' cannot be run"):
        launch(ssh="not-a-program")
    with pytest.raises(ArgumentError, match="grace_seconds=inf: expected a finite number"):
        launch_over_ssh(Program("x.py"), [Host("a")], remote=Remote(), grace_seconds=float("inf"))
    with pytest.raises(ArgumentError, match="ssh='': expected a command"):
        launch(ssh="")
    with pytest.raises(ArgumentError, match="""ssh="'": No closing quotation"""):
        launch(ssh="'")


def test_too_much_to_tell_is_told(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_LONG", "x" * 70_000)
    with pytest.raises(
        ArgumentError, match=r"what host a is told has .* bytes, more than 65,280; set fewer or shorter"
    ):
        launch_over_ssh(Program("x.py", initialize="nothing"), [Host("a")], remote=Remote(ssh=command))
