"""Launching on this machine: a program is what `python` would make of it, and its processes end together."""

import io
import json
import pickle
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from braidax.comm import Tuning
from braidax.errors import ArgumentError
from braidax.gang import launch
from braidax.gang.child import Birth
from braidax.gang.member import pack_call
from braidax.gang.processes import Command, Processes
from braidax.gang.program import Program
from tests.support.gang.forks import fork_children
from tests.support.gang.launched import INTERRUPTED, JOIN, SAVE, STOPS
from tests.support.gang.programs import wait_until_gone

Launch = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(tmp_path: Path) -> Launch:
    """Returns a function that launches the text of a script, without JAX, and returns exit code and lines."""

    def run_script(text: str, *arguments: str, size: int = 2, **options: Any) -> tuple[int, list[str]]:
        script = tmp_path / "scripts" / "program.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(dedent(text))
        log = io.StringIO()
        program = Program(str(script), arguments, initialize="nothing")
        try:
            code = launch.launch_here(program, size, log=log, **options)
        except KeyboardInterrupt:
            code = INTERRUPTED
        return code, log.getvalue().splitlines()

    return run_script


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks begin with what they import, in tests of how they end."""
    fork_children(monkeypatch, "braidax.comm", "braidax.gang.meeting", modules=["braidax.gang.runner"])


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has everything that is not told to stop killed at once."""

    def begin(self: Processes, *arguments: Any, **options: Any) -> None:
        Processes.__init__(self, *arguments, grace_seconds=0.0, **options)

    # A class, because annotations name it and are checked.
    monkeypatch.setattr(launch, "Processes", type("Processes", (Processes,), {"__init__": begin}))


def test_a_script_sees_what_python_would_show_it(run: Launch, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("name = 'beside'\n")
    text = JOIN + dedent("""
        import beside
        assert "jax" not in sys.modules
        print(__name__, sys.argv[1:], __file__ == sys.argv[0], beside.name, comm.rank)
        comm.close()
        """)
    code, lines = run(text, "--epochs", "3")
    assert code == 0
    assert sorted(lines) == [f"[{rank}] __main__ ['--epochs', '3'] True beside {rank}" for rank in range(2)]


def test_a_module_runs_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    log = io.StringIO()
    assert launch.launch_here(Program("package.inner", ("a",), "module", "nothing"), 1, log=log) == 0
    assert log.getvalue() == "[0] __main__ package ['a']\n"


def test_the_rank_that_raised_is_named_with_its_last_lines(run: Launch) -> None:
    text = JOIN + dedent("""
        with comm:
            if comm.rank == 1:
                raise ValueError("the value")
            comm.barrier()
        """)
    code, lines = run(text)
    assert code == 1
    told = lines.index(next(line for line in lines if line.startswith("braidax launch: ")))
    assert re.fullmatch(
        r"braidax launch: rank 1 \(pid \d+\) failed first: it ended with exit status 1; the last lines that it wrote:",
        lines[told],
    )
    assert lines[told + 1] == "Traceback (most recent call last):"  # from the program's own first line on
    assert "program.py" in lines[told + 2]
    assert lines[-1] == "ValueError: the value"
    assert "[1] ValueError: the value" in lines
    assert all(re.match(r"\[\d\] ", line) for line in lines[:told])


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("told_by", ["comm.barrier()", "raise CallFailed('rank 1 failed: ValueError: the value', 1)"])
def test_the_rank_that_raised_is_named_even_if_another_one_ends_first(run: Launch, told_by: str) -> None:
    text = JOIN + dedent(f"""
        from braidax.errors import CallFailed
        pids = comm.all_gather(np.array(os.getpid()))
        if comm.rank == 1:
            comm.abort("of what comes")
            while open(f"/proc/{{pids[0]}}/stat").read().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
            raise ValueError("the value")
        {told_by}
        """)
    code, lines = run(text)
    assert code == 1
    assert any(line.startswith("braidax launch: rank 1 ") for line in lines)
    assert lines[-1] == "ValueError: the value"


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("sys.exit(7)", 7, "ended with exit status 7"),
        pytest.param(
            "sys.exit('no more')",
            1,
            "ended with exit status 1; the last lines that it wrote:\nno more",
            marks=pytest.mark.slow,
        ),
        pytest.param("os._exit(9)", 9, "ended with exit status 9", marks=pytest.mark.slow),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by signal 9 (SIGKILL), as the kernel"),
    ],
)
def test_the_exit_code_is_that_of_the_first_that_failed(run: Launch, ending: str, code: int, told: str) -> None:
    found, lines = run(JOIN + f"\nif comm.rank == 1:\n    {ending}\ncomm.barrier()\n")
    text = "\n".join(lines)
    assert found == code
    assert "braidax launch: rank 1 (pid " in text
    assert f"failed first: it {told}" in text
    how = "braidax launch: run the same command again to go on from the last checkpoint, or give --restarts"
    assert (how in lines) == (code > 128)


@pytest.mark.usefixtures("forked")
def test_a_rank_that_ends_well_ends_nobody(run: Launch) -> None:
    text = JOIN + dedent("""
        pids = comm.all_gather(np.array(os.getpid()))
        comm.close()
        if comm.rank == 1:
            while open(f"/proc/{pids[0]}/stat").read().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
            print("went on")
        """)
    assert run(text) == (0, ["[1] went on"])


@pytest.mark.usefixtures("forked")
def test_all_start_again_under_the_next_generation(run: Launch) -> None:
    text = JOIN + dedent("""
        print("generation", os.environ["BRAIDAX_GENERATION"])
        comm.barrier()
        if comm.rank == 0 and os.environ["BRAIDAX_GENERATION"] != "2":
            sys.exit(5)
        comm.close()
        """)
    code, lines = run(text, restarts=2)
    assert code == 0
    assert [line for line in lines if line.startswith("[1] generation")] == [
        "[1] generation 0",
        "[1] generation 1",
        "[1] generation 2",
    ]
    assert "braidax launch: starts all again (restart 2 of 2)" in lines
    code, lines = run(text, size=1, restarts=1)
    assert code == 5
    assert sum("failed first" in line for line in lines) == 2


@pytest.mark.usefixtures("forked")
def test_what_the_others_have_started_ends_too(run: Launch) -> None:
    text = JOIN + dedent("""
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                time.sleep(600)
            print("pids", child, os.getpid(), flush=True)
        comm.barrier()
        if comm.rank == 1:
            sys.exit(1)
        time.sleep(600)
        """)
    code, lines = run(text)
    assert code == 1
    pids = next(line for line in lines if line.startswith("[0] pids "))
    wait_until_gone([int(pid) for pid in pids.split()[2:]], seconds=5)


def test_servers_that_no_step_calls_end_with_the_program(run: Launch) -> None:
    code, lines = run("import os\nprint(os.environ['BRAIDAX_SERVERS'], os.environ.get('BRAIDAX_SERVER'))", servers=2)
    assert code == 0
    assert sorted(lines[:2]) == ["[0] 2 None", "[1] 2 None"]
    assert lines[2].startswith(
        "braidax launch: the program has ended, and no step of it has met its 2 servers: give one"
    )
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("module", "told"),
    [pytest.param("nowhere", "ended with exit status 1", marks=pytest.mark.slow), ("this", "exit status 0")],
)
def test_a_server_that_ends_before_the_program_has_failed(
    run: Launch, module: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that says that all is well: nobody would serve the program."""
    monkeypatch.setattr("braidax.gang.program._SERVER_MODULE", module)
    code, lines = run("import time\ntime.sleep(600)", size=1, servers=1)
    assert code == 1
    assert any(re.search(rf"^braidax launch: server 0 \(pid \d+\) failed first: it .*{told}", line) for line in lines)


@pytest.mark.usefixtures("hurried")
def test_ranks_have_time_to_save_when_all_are_stopped(run: Launch) -> None:
    text = JOIN + SAVE + "ready()\nif comm.rank == 0:\n    os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)\n"
    code, lines = run(text)
    assert code == INTERRUPTED
    assert sorted(lines) == ["[0] ready", "[0] saved", "[1] ready", "[1] saved", STOPS.format(30)]


@pytest.mark.usefixtures("forked", "hurried")
def test_an_interrupt_that_another_thread_gets_is_heard(run: Launch) -> None:
    text = JOIN + SAVE + "ready()\nif comm.rank == 0:\n    os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)\n"
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        code, lines = run(text)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
        other.join()
    assert code == INTERRUPTED
    assert STOPS.format(30) in lines


@pytest.mark.usefixtures("forked")
def test_who_has_not_saved_in_time_is_killed_and_named(run: Launch) -> None:
    text = (
        JOIN
        + SAVE
        + dedent("""
        if comm.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready()
        if comm.rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)
        """)
    )
    code, lines = run(text, grace_seconds=2.5)
    assert code == INTERRUPTED
    assert STOPS.format(2.5) in lines
    assert {"[0] saved"} == {line for line in lines if "saved" in line}
    assert lines[-1] == "braidax launch: had to kill ranks that did not end: 1"


@pytest.mark.usefixtures("forked")
def test_a_second_interrupt_ends_all_at_once(run: Launch) -> None:
    text = (
        JOIN
        + SAVE
        + dedent("""
        def again(*_):
            if comm.rank == 0:
                os.kill(os.getppid(), signal.SIGINT)

        signal.signal(signal.SIGTERM, again)
        ready()
        if comm.rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
        while True:
            time.sleep(600)
        """)
    )
    code, lines = run(text, grace_seconds=10_000.0)
    assert code == INTERRUPTED
    assert sorted(lines) == ["[0] ready", "[1] ready", STOPS.format(10_000)]


@pytest.mark.usefixtures("forked", "hurried")
def test_the_failure_of_one_leaves_the_others_no_such_time(run: Launch) -> None:
    text = JOIN + SAVE + "ready()\nif comm.rank == 0:\n    sys.exit(7)\ntime.sleep(600)\n"
    code, lines = run(text, grace_seconds=10_000.0)
    assert code == 7
    assert not [line for line in lines if "saved" in line or "stops" in line]


def test_each_process_sees_its_gpus(run: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_gpus", lambda: ["0", "1", "2", "3"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    code, lines = run("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    assert code == 0
    assert sorted(lines) == ["[0] 0,1", "[1] 2,3"]


def test_secrets_are_on_no_command_line(run: Launch) -> None:
    text = """
        import os
        secret = os.environ["BRAIDAX_SECRET"]
        print(len(secret), secret in open("/proc/self/cmdline").read())
        """
    assert run(text, size=1) == (0, ["[0] 64 False"])


def test_secrets_are_in_no_text_of_an_object() -> None:
    secret = b"0123456789abcdef"
    job = launch.Job(secret, "tcp", "job")
    told = job.environment("tcp://here:1", 0)
    birth = Birth(0, "tcp", ("here", 1, secret), 0.0, 1.0, Tuning())
    command = Command(("python",), told, stdin=json.dumps(told).encode())
    for what in (job, birth, command, [job], pickle.loads(pickle.dumps(birth))):
        assert secret.hex() not in repr(what)
        assert secret.decode() not in repr(what)
    with pytest.raises(ArgumentError, match=r"args\[0\] is \(Job\(transport='tcp', name='job'\), <unlocked") as caught:
        pack_call(print, ((job, threading.Lock()),), "job")
    assert secret.decode() not in str(caught.value)


def test_wrong_numbers_are_told() -> None:
    with pytest.raises(ArgumentError, match="servers=-1: expected how many processes have tables"):
        launch.launch_here(Program("program.py"), 1, servers=-1)
    with pytest.raises(ArgumentError, match="num_processes=0: expected at least 1"):
        launch.launch_here(Program("x.py"), 0)
    with pytest.raises(ArgumentError, match="restarts=-1: expected 0 or more"):
        launch.launch_here(Program("x.py"), 1, restarts=-1)
    with pytest.raises(ArgumentError, match="grace_seconds=-1: expected a finite number of seconds >= 0"):
        launch.launch_here(Program("x.py"), 1, grace_seconds=-1)


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    log = io.StringIO()
    assert launch.launch_here(Program(str(tmp_path / "none.py"), initialize="nothing"), 1, log=log) == 1
    assert "No such file or directory" in log.getvalue()
