"""How long each folder of tests takes, and may take."""

from collections import Counter
from collections.abc import Mapping

import pytest

BUDGET_SECONDS: dict[str, int] = {
    "checkpoint": 40,
    "cli": 29,
    "comm": 83,
    "connections": 3,
    "data": 64,
    "frame": 70,
    "gang": 54,
    "harness": 7,
    "laws": 21,
    "parallel": 265,
    "program": 26,
    "tasks": 19,
    "torch": 8,
    "tune": 15,
    "tests": 16,
}
"""Of all tests of a folder, one after the other, in the shares that the last whole run had; `tests` are the files that
lie in no folder."""

NOISE = 1.6
"""How many times its budget a folder may take, beyond what the machine is slower by than the one of the budgets. Three
tests share two cores, and on slow CPUs all folders were seen to take 4 to 6.5 times theirs, each its share of that."""

LONG_FILES = (
    "tests/cli/test_train.py",
    "tests/laws/test_docs.py",
    "tests/test_examples.py",
    "tests/test_trained_together.py",
    "tests/parallel/test_restored.py",
    "tests/parallel/test_launched.py",
    "tests/parallel/test_processes.py",
    "tests/parallel/test_wrap.py",
    "tests/parallel/test_trainable.py",
    "tests/parallel/test_hybrid_options.py",
    "tests/parallel/test_hybrid_clipping.py",
    "tests/parallel/dense/test_hops.py",
    "tests/parallel/dense/test_in_parts.py",
    "tests/parallel/dense/test_overlap.py",
    "tests/parallel/dense/test_rotated.py",
    "tests/parallel/rows/test_decorated.py",
    "tests/parallel/rows/test_run_ahead.py",
    "tests/parallel/served/test_losing.py",
    "tests/parallel/stages/running/test_processes.py",
    "tests/parallel/workers/test_apart.py",
    "tests/parallel/workers/test_killed.py",
    "tests/parallel/workers/test_losing.py",
    "tests/checkpoint/test_several_places.py",
    "tests/checkpoint/test_crash.py",
    "tests/checkpoint/test_streaming.py",
    "tests/comm/faults/test_faults.py",
    "tests/comm/faults/test_partitions.py",
    "tests/comm/transports/test_mpi.py",
    "tests/data/fetching/test_faults.py",
    "tests/frame/clusters/test_ray.py",
    "tests/frame/losing/test_kills.py",
    "tests/frame/test_bounded.py",
    "tests/data/storage/test_once.py",
    "tests/laws/test_conftest.py",
    "tests/laws/test_side_effects.py",
    "tests/tasks/test_digits.py",
    "tests/tasks/test_inception_v3.py",
    "tests/tasks/test_bert.py",
)
"""Files of few tests, or late in the alphabet, that take long: they begin first, so that none is left for the end."""

SAME_GANGS = ("tests/parallel/served/", "tests/parallel/workers/", "tests/parallel/test_processes.py")
"""Files whose tests share gangs of servers, which end when a test elsewhere follows: they begin even before, one after
the other, in one process. Each process that has some of them starts servers of its own, which compile what they run."""


SAME_PROCESS = {
    "tests/checkpoint/test_several_places.py": "tests/checkpoint/test_several",
    "tests/checkpoint/test_several_processes.py": "tests/checkpoint/test_several",
    **{
        f"tests/frame/{name}.py": "tests/frame"
        for name in (
            "losing/test_replays",
            "sight/test_bar",
            "sight/test_profile",
            "sight/test_telling",
            "test_bounded",
            "test_lines",
            "test_spilling",
        )
    },
    **{
        f"tests/laws/test_{name}.py": "tests/laws"
        for name in ("annotations", "budgets", "floors", "messages", "side_effects", "site", "words")
    },
}
"""Files that one process runs, by the name of what they share: processes of one `jax.distributed`, ranks of frames, and
all our modules, parsed. In several processes each would make them for itself."""


def scope_of(path: str) -> str:
    """Returns the name under which pytest-xdist hands out a file: one name goes to one process."""
    return SAME_GANGS[0] if path.startswith(SAME_GANGS) else SAME_PROCESS.get(path, path)


def begin_long_ones_first(items: list[pytest.Item]) -> None:
    """Orders tests by file: `SAME_GANGS`, `LONG_FILES`, then those of most tests. The tests of a file stay together.

    pytest-xdist hands files out in this order with `--no-loadscope-reorder`. Its own would be by number of tests alone:
    then two processes wait for the one that runs a file of few long tests.
    """
    num_tests = Counter(item.location[0] for item in items)

    def order(item: pytest.Item) -> tuple[bool, bool, int, str]:
        path = item.location[0]
        return not path.startswith(SAME_GANGS), path not in LONG_FILES, -num_tests[path], path

    items.sort(key=order)


def over_budget(seconds: Mapping[str, float]) -> list[str]:
    """Says which folders took longer than they may. **Arguments:** `seconds`: that each folder took."""
    budgets = {folder: BUDGET_SECONDS.get(folder, 0) for folder in seconds}
    slower = max(1.0, sum(seconds.values()) / max(1, sum(budgets.values())))
    return [
        f"tests/{folder} took {taken:.0f} s: at most {NOISE:g} times its budget of {budgets[folder]} s, on a machine "
        f"that took {slower:.1f} times all budgets; make it quicker, or mark the long ones slow"
        for folder, taken in sorted(seconds.items())
        if taken > NOISE * slower * budgets[folder]
    ]


class SuiteTime:
    """A plugin that prints what each folder took, and fails a run in which one took more than it may.

    **Arguments:** `is_judged`: says whether a folder over its budget fails the run, or is only shown.
    """

    def __init__(self, *, is_judged: bool) -> None:
        self._is_judged = is_judged
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds what a phase of a test took."""
        parts = report.location[0].split("/")
        self._seconds[parts[1] if len(parts) > 2 else "tests"] += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails the run, before its end is told."""
        if self._is_judged and over_budget(self._seconds) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints a line for all folders of a long run, and one for each that took too long."""
        is_long = sum(self._seconds.values()) >= 60
        if is_long:
            taken = ", ".join(f"{folder} {seconds:.0f}" for folder, seconds in self._seconds.most_common())
            terminalreporter.write_line(f"seconds of tests, by folder: {taken}")
        for words in over_budget(self._seconds) if is_long or self._is_judged else ():
            terminalreporter.write_line(words, red=True)
