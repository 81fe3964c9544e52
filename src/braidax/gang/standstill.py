"""A rank whose program stands still says so, and where: a step that does not end would otherwise be silent."""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Generator
from types import FrameType
from typing import NamedTuple

STANDSTILL_SECONDS = 60.0
"""How long a program stands at one place, and nothing is computed, before that is said."""

_LOOKS = 12  # within that time
_BUSY = 0.1  # of a core: a process that computes as much, as a compiler does, gets on
_STEP_SECONDS = 10e-6  # of computing: less than a thread takes to begin a step


class _Look(NamedTuple):
    """What is seen of a thread and its process. No frame is kept: that would keep what its variables hold."""

    stack: tuple[tuple[int, int], ...]
    thread_seconds: float
    process_seconds: float


@contextlib.contextmanager
def naming_standstill(who: str, *, seconds: float | None = None) -> Generator[None, None, None]:
    """Writes to `sys.stderr` where the calling thread stands, once it has stood still in the block for so long.

    It stands still when it stays at one place, computes nothing, and the whole process computes next to nothing. That
    is said once for each time, and nothing is ended: a program may wait for a reason.

    **Arguments:** `who`: in words, such as `rank 1`. `seconds`: that it may stand still, by default
    `STANDSTILL_SECONDS`.
    """
    if sys.platform != "linux":  # the clock of another thread cannot be read elsewhere
        yield
        return
    limit = STANDSTILL_SECONDS if seconds is None else seconds
    stop = threading.Event()
    of_thread = threading.get_ident(), time.pthread_getcpuclockid(threading.get_ident())
    watching = threading.Thread(
        target=_watch, args=(*of_thread, who, limit, stop), name="braidax-standstill", daemon=True
    )
    watching.start()
    try:
        yield
    finally:
        stop.set()
        watching.join()


def _watch(thread: int, clock: int, who: str, seconds: float, stop: threading.Event) -> None:
    pause = seconds / _LOOKS
    last, since, is_told = _look(thread, clock), time.monotonic(), False
    while not stop.wait(pause):
        look = _look(thread, clock)
        if not _is_still(last, look, pause):
            since, is_told = time.monotonic(), False
        elif time.monotonic() - since >= seconds and not is_told:
            is_told = True
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                sys.stderr.write(_told(thread, who, seconds))
                sys.stderr.flush()
        last = look


def _look(thread: int, clock: int) -> _Look:
    stack: list[tuple[int, int]] = []
    frame = _innermost(thread)
    while frame is not None:
        stack.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return _Look(tuple(stack), time.clock_gettime(clock), time.process_time())


def _is_still(last: _Look, look: _Look, pause: float) -> bool:
    return (
        look.stack == last.stack
        and look.thread_seconds - last.thread_seconds < _STEP_SECONDS
        and look.process_seconds - last.process_seconds < _BUSY * pause
    )


def _told(thread: int, who: str, seconds: float) -> str:
    frame = _innermost(thread)
    stack = traceback.extract_stack(frame)
    inside = [number + 1 for number, place in enumerate(stack) if place.filename == "<frozen runpy>"]
    lines = traceback.format_list(stack[inside[-1] if inside else 0 :])  # from the program's own first line on
    return (
        f"braidax: {who} has stood still for {seconds:g} s, and goes on waiting here:\n{''.join(lines)}"
        "If it waits for other ranks, see where these are: all must take the same steps in the same order.\n"
    )


def _innermost(thread: int) -> FrameType | None:
    return sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
