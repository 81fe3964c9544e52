"""Processes: their lines, the first end, and how all end together."""

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from braidax.gang.processes import (
    LOG_LINES,
    MAX_STDIN_BYTES,
    Command,
    Ending,
    Processes,
    Stream,
    describe_status,
    print_lines,
)
from tests.support.gang.programs import is_gone, wait_until_gone

Start = Callable[..., Processes]


class Lines(list[tuple[int, str, str]]):
    """Keeps what is written."""

    def write(self, number: int, stream: Stream, line: str) -> None:
        self.append((number, stream, line))


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def start(lines: Lines) -> Iterator[Start]:
    """Returns a function that starts programs in Python, which are ended behind the test."""
    started: list[Processes] = []

    def begin(*codes: str, grace_seconds: float = 5.0, stdin: bytes | None = None) -> Processes:
        commands = [Command((sys.executable, "-uc", code), dict(os.environ), stdin=stdin) for code in codes]
        started.append(Processes(commands, write=lines.write, grace_seconds=grace_seconds))
        return started[-1]

    yield begin
    for processes in started:
        processes.end()


def ends(processes: Processes, num: int) -> dict[int, Ending]:
    """Waits until so many processes have ended."""
    found: dict[int, Ending] = {}
    while len(found) < num:
        found |= {ending.number: ending for ending in processes.wait(timeout_seconds=30)}
    return found


def greeting(rank: int, peers: int = 3) -> str:
    """Returns what Gloo writes, without the end of the line."""
    return f"[Gloo] Rank {rank} is connected to {peers} peer ranks. Expected number of connected peer ranks is : 3"


@pytest.mark.parametrize(
    ("written", "left"),
    [
        (greeting(0) + "\nstep 1\n" + greeting(1) + "\n\n7\n", ["step 1", "", "7"]),
        (greeting(0) + greeting(1) + "\n\n\n", [""]),  # two at once: both ends come behind
        ("[Gloo] Rank " + greeting(1) + "\n" + greeting(3)[len("[Gloo] Rank ") :] + "\n7\n", ["7"]),
        (greeting(0, peers=2) + "\n", [greeting(0, peers=2)]),  # one is missing
        (greeting(0) + " or so\n", [greeting(0) + " or so"]),
        (" is connected to \n3\n", [" is connected to ", "3"]),
    ],
)
def test_what_gloo_greets_with_is_left_out(start: Start, lines: Lines, written: str, left: list[str]) -> None:
    (ending,) = ends(start(f"import sys; sys.stdout.write({written!r}); print('x', file=sys.stderr)"), 1).values()
    assert [line for _, stream, line in lines if stream == "stdout"] == left
    assert sorted(ending.log) == sorted([*left, "x"])


def test_on_stderr_no_greeting_is_left_out(start: Start, lines: Lines) -> None:
    ends(start(f"import sys; print({greeting(0)!r}, file=sys.stderr)"), 1)
    assert lines == [(0, "stderr", greeting(0))]


def test_what_jax_says_of_sigterm_is_left_out(start: Start, lines: Lines) -> None:
    told = (
        "W1129 02:24:38.995494    1939 preemption_notifier.cc:90] SIGTERM caught at 2026-11-29T02:24:38.995482535+00:00"
    )
    other = told.replace("SIGTERM caught at", "SIGTERM handler is")
    ends(start(f"import sys; print({told!r}, {other!r}, 'saved', sep=chr(10), file=sys.stderr); print({told!r})"), 1)
    assert sorted(lines) == [(0, "stderr", other), (0, "stderr", "saved"), (0, "stdout", told)]


def test_lines_are_whole_and_told_apart(start: Start, lines: Lines) -> None:
    code = (
        "import sys; "
        "[print(part, end='', file=file) for part in ('a', 'b\\n', 'ä') for file in (sys.stdout, sys.stderr)]"
    )
    ends(start(code, "print('x' * 100_000)"), 2)
    assert sorted(line for line in lines if line[0] == 0) == [
        (0, "stderr", "ab"),
        (0, "stderr", "ä"),
        (0, "stdout", "ab"),
        (0, "stdout", "ä"),
    ]
    assert "".join(line for number, _, line in lines if number == 1) == "x" * 100_000  # cut where it is too long


def test_the_last_lines_are_kept(start: Start) -> None:
    ending = ends(start("print(*range(100), sep='\\n'); raise SystemExit(7)"), 1)[0]
    assert ending.log == tuple(str(number) for number in range(100 - LOG_LINES, 100))
    assert (ending.status, ending.exit_code, ending.how) == (7, 7, "ended with exit status 7")


def test_ends_are_told_in_their_order(start: Start) -> None:
    waiting = "import os; os.read(0, 1)"
    processes = start(waiting, "import os, signal; os.kill(os.getpid(), signal.SIGABRT)", stdin=b"")
    (ending,) = processes.wait(timeout_seconds=30)
    assert (ending.number, ending.status, ending.exit_code) == (1, -signal.SIGABRT, 128 + signal.SIGABRT)
    assert ending.how == "was ended by signal 6 (SIGABRT)"
    assert processes.wait(timeout_seconds=0) == []
    processes.end(leave_seconds=30)
    assert ends(processes, 1)[0].status == 0  # its input ended, and no signal was needed


def test_a_process_reads_what_it_is_given_first(start: Start, lines: Lines) -> None:
    processes = start("import sys; print(sys.stdin.readline()); sys.stdin.read()", stdin=b"hello\n")
    processes.end(leave_seconds=30)
    assert (0, "stdout", "hello") in lines


def test_who_ignores_the_first_signal_is_killed_with_its_children(start: Start, lines: Lines) -> None:
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); "
        "print(f'{os.getpid()}\\n', end=''); time.sleep(600)"
    )
    processes = start(code, grace_seconds=0.2)
    while len(lines) < 2:
        processes.wait(timeout_seconds=0.05)
    pids = [int(line) for _, _, line in lines]
    assert not any(is_gone(pid) for pid in pids)
    processes.end()
    assert ends(processes, 1)[0].status == -signal.SIGKILL
    wait_until_gone(pids, seconds=5)


def test_processes_can_be_told_and_asked_to_end(start: Start, lines: Lines) -> None:
    processes = start("import sys; print(sys.stdin.readline()); sys.stdin.read()", stdin=b"")
    processes.tell(b"hello\n")
    while (0, "stdout", "hello") not in lines:
        processes.wait(timeout_seconds=0.05)
    assert not processes.wait_for_all(0.01)
    processes.ask()
    assert processes.wait_for_all(30)
    assert ends(processes, 1)[0].status == -signal.SIGTERM
    processes.tell(b"x" * 100_000)  # nobody is there


def test_who_reads_nothing_holds_nobody_up(start: Start) -> None:
    processes = start("import time; time.sleep(600)", stdin=b"x" * MAX_STDIN_BYTES)
    for _ in range(1000):
        processes.tell(b"hello\n")


def test_an_end_may_take_longer_or_shorter_than_others(start: Start, lines: Lines) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(7))); "
        "print('ready'); time.sleep(600)"
    )
    for own, given, status in ((0.0, 30.0, 7), (600.0, 0.0, -signal.SIGKILL)):
        lines.clear()
        processes = start(code, grace_seconds=own)
        while not lines:
            processes.wait(timeout_seconds=0.05)
        processes.end(grace_seconds=given)
        assert ends(processes, 1)[0].status == status


def test_a_wait_can_be_ended_and_has_a_limit(start: Start) -> None:
    processes = start("import time; time.sleep(600)")
    assert processes.wait(timeout_seconds=0.01) == []
    processes.wake()
    assert processes.wait(timeout_seconds=None) == []


def test_a_program_that_is_not_there_leaves_nothing_of_the_others() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    there = Command((sys.executable, "-c", "import time; time.sleep(600)"), dict(os.environ))
    with pytest.raises(FileNotFoundError):
        Processes([there, Command(("not-a-program",), {})], write=print_lines(["", ""]))
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_lines_get_a_prefix_and_go_where_they_can() -> None:
    file = io.StringIO()
    print_lines(["[0] ", "[1] "], file)(1, "stderr", "hello")
    assert file.getvalue() == "[1] hello\n"
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_lines(["[0] "], narrow)(0, "stdout", "ä")
    assert narrow.buffer.getvalue() == b"[0] \\xe4\n"


def test_a_reader_that_is_gone_holds_nobody_up(start: Start, lines: Lines) -> None:
    def gone(number: int, stream: Stream, line: str) -> None:
        lines.write(number, stream, line)
        raise BrokenPipeError

    code = "print('x' * 1000 + '\\n' * 1000 * 200)"
    processes = Processes([Command((sys.executable, "-c", code), dict(os.environ))], write=gone)
    try:
        assert ends(processes, 1)[0].status == 0
    finally:
        processes.end()
    assert len(lines) == 1


def test_signals_have_names() -> None:
    assert describe_status(-signal.SIGKILL) == (
        "was ended by signal 9 (SIGKILL), as the kernel does when memory runs out"
    )
    assert describe_status(-200) == "was ended by signal 200 (of no name)"


def test_processes_are_added_and_given_up(start: Start, lines: Lines) -> None:
    """What is given up ends with all it has started, and holds no descriptor any more; its number stays its own."""

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    sleeping = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid); time.sleep(600)"
    processes = start("print('first'); input()", stdin=b"")
    wait_for(lambda: lines == [(0, "stdout", "first")])  # the thread that waits for processes has what it opens
    before = open_files()
    command = Command((sys.executable, "-uc", sleeping), dict(os.environ))
    assert processes.add([command, command]) == [1, 2]
    wait_for(lambda: sorted(number for number, *_ in lines) == [0, 1, 2])
    children = {number: int(line) for number, _, line in lines if number}
    processes.discard(1)
    wait_until_gone([children[1]], seconds=5)
    assert not is_gone(children[2])
    processes.discard(2)
    processes.discard(1)
    wait_for(lambda: open_files() <= before)
    assert processes.add([Command((sys.executable, "-c", "raise SystemExit(3)"), dict(os.environ))]) == [3]
    assert ends(processes, 3)[3].how == "ended with exit status 3"
    assert not processes.wait_for_all(0.0)  # the first one lives
    processes.end()
    wait_until_gone(list(children.values()), seconds=5)


def test_what_a_discarded_process_wrote_is_not_read_behind_its_end() -> None:
    """Its end and its closed pipes may be seen at once: while nobody looked, all of them came."""
    lines, is_stopped, goes_on = Lines(), threading.Event(), threading.Event()

    def write(number: int, stream: Stream, line: str) -> None:
        lines.write(number, stream, line)
        if line == "stop":
            is_stopped.set()
            assert goes_on.wait(30)

    def command(code: str) -> Command:
        return Command((sys.executable, "-uc", code), dict(os.environ))

    processes = Processes([command("import time; time.sleep(600)")], write=write)
    try:
        child = (
            "import os, subprocess, time; "
            "print(os.getpid(), subprocess.Popen(['sleep', '600'], start_new_session=True).pid); time.sleep(600)"
        )
        assert processes.add([command(child)]) == [1]
        wait_for(lambda: len(lines) == 1)
        assert processes.add([command("print('stop'); import time; time.sleep(600)")]) == [2]
        assert is_stopped.wait(30)
        processes.discard(1)
        parent, other = map(int, lines[0][2].split())
        wait_until_gone([parent], seconds=5)
        os.kill(other, signal.SIGKILL)  # which has its pipes, and closes them behind its end
        wait_until_gone([other], seconds=5)
        goes_on.set()
        assert processes.add([command("raise SystemExit(3)")]) == [3]
        assert ends(processes, 2)[3].how == "ended with exit status 3"
    finally:
        goes_on.set()
        processes.end()


def wait_for(is_so: Callable[[], bool]) -> None:
    """Waits until something that happens by itself has happened."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
