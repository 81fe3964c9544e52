"""The loader's threads end: when closed, when abandoned, and with the interpreter, whatever hangs."""

import subprocess
import sys
import threading
import weakref

import pytest

from braidax.data.workers.threads import Threads
from braidax.errors import WaitTimeout
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children

HANGING = """
import threading, jax, numpy as np, braidax as bx

class Hangs:
    def __len__(self): return 64
    def __getitem__(self, index):
        if index: threading.Event().wait()
        return {"x": np.zeros(3, np.float32)}

sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), jax.P())
for _ in bx.DataLoader(Hangs(), None, sharding, batch_size=8, knobs=bx.data.Knobs(timeout_seconds=1)):
    pass
"""


def test_results_and_errors_come_through_futures() -> None:
    threads = Threads(2, "braidax-test")
    assert threads.submit(divmod, 7, 2).result(10) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(10)
    threads.close(timeout_seconds=10)


def test_what_is_queued_first_comes_before_what_was_queued_earlier() -> None:
    threads, begun, release, order = Threads(1, "braidax-test"), threading.Event(), threading.Event(), list[str]()
    threads.run(lambda: (begun.set(), release.wait(60)))
    assert begun.wait(10)
    threads.run(order.append, "a")
    threads.run_first(order.append, "first")
    threads.run(order.append, "b")
    threads.run_first(order.append, "second")
    release.set()
    assert threads.submit(len, order).result(10) == 4
    assert order == ["first", "second", "a", "b"]
    threads.close(timeout_seconds=10)


def test_closing_drops_what_is_queued_and_waits_for_what_runs() -> None:
    threads, begun, release = Threads(1, "braidax-test"), threading.Event(), threading.Event()
    running = threads.submit(lambda: (begun.set(), release.wait(60)))
    queued = threads.submit(pytest.fail, "was queued only")
    assert begun.wait(10)
    threads.run_first(queued.set_result, "was queued only")
    with pytest.raises(WaitTimeout, match=r"'braidax-test-0' did not end within timeout_seconds=0.05"):
        threads.close(timeout_seconds=0.05)
    release.set()
    assert running.result(10)[1]
    assert not queued.done()
    threads.close(timeout_seconds=10)  # a second time: nothing


def test_what_is_dropped_is_not_kept() -> None:
    class Memory:
        """A weak reference can be made of it."""

    threads, begun, release, memory = Threads(1, "braidax-test"), threading.Event(), threading.Event(), Memory()
    gone = weakref.ref(memory)
    threads.run(lambda: (begun.set(), release.wait(60)))
    assert begun.wait(10)
    threads.run(id, memory)
    threads.run_first(id, memory)
    threads.abandon()
    del memory
    assert gone() is None
    release.set()


def test_a_read_that_hangs_for_ever_does_not_keep_the_interpreter_from_exiting(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children(monkeypatch, *LOAD_AND_SAVE, codes=(HANGING,))
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "WaitTimeout: the batch at Cursor(seed=0, epoch=0, position=0)" in done.stderr


def test_threads_yield_their_core_while_somebody_waits_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    yielded, calls = threading.Semaphore(0), list[None]()
    monkeypatch.setattr("braidax.data.workers.threads._let_others_run", lambda: (calls.append(None), yielded.release()))
    threads = Threads(1, "braidax-test")
    threads.submit(int).result(10)
    threads.submit(int).result(10)  # by now the first call is behind the thread
    assert calls == []
    with threads.awaited():
        threads.submit(int).result(10)
        assert yielded.acquire(timeout=10)
    threads.submit(int).result(10)
    threads.close(timeout_seconds=10)
    assert 1 <= len(calls) <= 2  # the second call may still have ended while somebody waited


def test_an_interrupt_behind_a_thread_s_start_leaves_none_that_nobody_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was not in the list took another's end mark, and `close` waited for that one up to its limit."""
    threads, start = Threads(1, "braidax-test"), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        threads.resize(2)
    started = [thread for thread in threading.enumerate() if thread.name.startswith("braidax-test")]
    assert len(started) == 2
    threads.close(timeout_seconds=10)
    assert not any(thread.is_alive() for thread in started)


def test_an_interrupt_before_a_thread_s_start_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    threads = Threads(1, "braidax-test")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        threads.resize(2)
    assert threads.submit(int).result(10) == 0
    threads.close(timeout_seconds=10)
