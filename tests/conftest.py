"""What every test gets: 8 virtual CPU devices, no leaked threads, and no skip that goes unseen in CI."""

import gc
import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jaxtyping
import pytest

pytest.register_assert_rewrite("tests.support")  # what it asserts says what it compared; before any of it is imported

from tests.support.compiled import share_compiled  # noqa: E402 (behind what rewrites it)
from tests.support.suite_time import SuiteTime, begin_long_ones_first, scope_of  # noqa: E402 (behind what rewrites it)

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
QUICK = "not slow and not gpu"  # what runs where nothing else is asked for
THREAD_SECONDS = 10.0

# XLA's emitters of loops compile in less than half the time of those that fuse by MLIR. An XLA that no longer knows the
# flag ends the process and names it: then it may go. Programs in several modules compile on several cores, which the
# tests beside have busy.
QUICK_COMPILER = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# --jaxtyping-packages finds it by the same name.
importlib.import_module("tests.support.annotations").check_quickly()

# Before anything touches a backend; child processes of tests choose for themselves.
jax.config.update("jax_num_cpu_devices", 8)
# With as many threads as devices a program of two sums that need not wait for one another was seen to stand still: some
# devices began with one, some with the other. Two a device, as `braidax launch` gives; children inherit it.
os.environ.setdefault("PJRT_NPROC", "16")

# What tests compile runs for a moment: it is compiled quickly, in their child processes too; by `make nightly` fully.
if os.environ.get("BRAIDAX_TESTS_COMPILE") != "fully":
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ["XLA_FLAGS"] = f"{QUICK_COMPILER} {os.environ.get('XLA_FLAGS', '')}".strip()

# The lines of Python that each operation of a program comes from take a seventh of the time, and no test reads them.
jax.config.update("jax_traceback_in_locations_limit", 0)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# Child processes, which tests kill, share in nothing, but for forks (tests/support/gang/forks.py).
share_compiled()

AOT = Path(sys.prefix) / "aot"

hypothesis.settings.register_profile("local", deadline=None, max_examples=30)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile("ci" if IN_CI else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Counts the time of folders, in the process that hears of all tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SuiteTime(is_judged=IN_CI and config.option.markexpr == QUICK), "suite-time")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looks for no garbage while modules and tests are made, none of which is any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Leaves out the slow cases of a test where they do not run: there are more of them than of all tests that do, and
    each process would make tests of them only to deselect those. One stays where a test has no others."""
    yield
    if metafunc.config.option.markexpr == QUICK:
        is_slow = metafunc.definition.get_closest_marker("slow") is not None
        quick = (
            [] if is_slow else [case for case in metafunc._calls if "slow" not in {mark.name for mark in case.marks}]
        )
        metafunc._calls = quick or metafunc._calls[:1]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders files, where several processes share them."""
    if hasattr(config, "workerinput"):
        begin_long_ones_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands files out to processes, several at once where these share what takes long to make."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid))

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Leaves modules and tests, millions of objects, out of later collections of garbage, and has fewer of those."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leaves what a file has made and is kept, such as traces and programs, out of later collections, too: tests that
    ask for one would wait a second for the million objects of all files before them."""
    if nextitem is not None and nextitem.path != item.path:
        gc.freeze()


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fails a test that leaves behind a thread of braidax, or any thread that would keep the interpreter alive."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + THREAD_SECONDS
    leaked = [
        thread
        for thread in threading.enumerate()
        if thread not in before and (not thread.daemon or thread.name.startswith("braidax"))
    ]
    for thread in leaked:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = [thread.name for thread in leaked if thread.is_alive()]
    assert not alive, f"threads still alive {THREAD_SECONDS:g} s after the test: {alive}"


@pytest.fixture(autouse=True)
def own_signals() -> None:
    """Gives a test the signals as a program finds them: Ray takes some, and a shell's "&" has SIGINT ignored."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps indexes, copies and pages that sources keep out of the user's own cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def aot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test find the compilers of GPUs and TPUs, which lie beside the environment; JAX has begun without them."""
    jax.devices()
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # JAX has read it; libtpu ends the process where it knows no flag
    monkeypatch.syspath_prepend(str(AOT))
    if not AOT.exists() and importlib.util.find_spec("jax_plugins") is None:
        pytest.skip(f"needs jax-cuda12-pjrt: make test installs it into {AOT}")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches the run-time check of annotations off, for a test that passes what the annotations forbid."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names no test by bytes: made anew in each process that collects, they may differ, and tests are told by name."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skipped test is a failed one: everything a test needs is installed there."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and in CI nothing may be: {call.excinfo and call.excinfo.value}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole module that skips itself while it is collected."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped, and in CI nothing may be: {report.longrepr}"
    return report
