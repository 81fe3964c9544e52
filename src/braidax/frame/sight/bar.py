"""A bar for each operation of a plan, while ranks compute it."""

import contextlib
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any, Literal, final

from braidax.connections.hosts import LOOPBACK, host_addresses
from braidax.errors import ArgumentError
from braidax.frame.sight.measuring import State
from braidax.frame.sight.operation import size_of
from braidax.frame.sight.telling import EVERY_SECONDS, MAX_BYTES, Watcher, unpacked

Show = Literal["bar", "nothing"]
"""What is shown of a plan while it is computed: a bar for each operation, on stderr where that is a terminal."""

_QUIET_SECONDS = 1.0  # what takes longer shows bars
_MOST_DATAGRAMS = 256  # that are read before it is drawn again, whoever sends them
_ROOM = 2  # lines of the terminal that are left


def check_show(show: str) -> None:
    """Checks what is to be shown. **Raises:** `ArgumentError`."""
    if show not in ("bar", "nothing"):
        raise ArgumentError(f"{show=}: expected 'bar' or 'nothing'")


@contextlib.contextmanager
def drawn(hosts: Sequence[str]) -> Generator[Watcher | None]:
    """Draws bars on stderr, inside the block, of what ranks tell; nothing where that is no terminal.

    **Arguments:** `hosts`: the name of each rank's host.

    **Yields:** whom the ranks are to tell; None for nobody.
    """
    if not sys.stderr.isatty():
        yield None
        return
    with contextlib.ExitStack() as stack:
        found: list[socket.socket] = []
        for address in [LOOPBACK] if set(hosts) == {socket.gethostname()} else host_addresses():
            with contextlib.suppress(OSError):  # it may be one by which a gateway is reached, which is not here
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                one = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
                one.setblocking(False)
                one.bind((address, 0))
                found.append(one)
        secret = secrets.token_bytes(32)
        bars = stack.enter_context(contextlib.closing(_Bars(len(hosts), found, secret)))
        bars.start()
        yield Watcher(tuple((one.getsockname()[0], one.getsockname()[1]) for one in found), secret)


@final
class _Bars:
    """Hears ranks and draws what they tell, in a thread of its own, from `start` to `close`."""

    def __init__(self, size: int, sockets: Sequence[socket.socket], secret: bytes) -> None:
        self._size, self._secret = size, secret
        self._sockets = sockets
        self._told = [(-1, dict[int, State]()) for _ in range(size)]
        self._begun: list[int] = []
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._draw_all, name="braidax-bars", daemon=True)

    def start(self) -> None:
        """Begins to hear and to draw."""
        self._thread.start()

    def close(self) -> None:
        """Takes away what is drawn, and ends the thread."""
        self._wake.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._woken.close()

    def _draw_all(self) -> None:
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:  # the terminal may be gone
            selector = stack.enter_context(selectors.DefaultSelector())
            for one in (*self._sockets, self._woken):
                selector.register(one, selectors.EVENT_READ)
            drawn_at = time.monotonic() + _QUIET_SECONDS
            drawing: _Drawing | None = None
            while True:
                ready = [key.fileobj for key, _ in selector.select(max(0.0, drawn_at - time.monotonic()))]
                if self._woken in ready:
                    return
                for one in ready:
                    assert isinstance(one, socket.socket)
                    self._hear(one)
                if time.monotonic() < drawn_at:
                    continue
                drawn_at = time.monotonic() + EVERY_SECONDS
                if drawing is None:
                    drawing = stack.enter_context(contextlib.closing(_Drawing()))
                drawing.draw([self._line(number) for number in self._begun])

    def _hear(self, one: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_DATAGRAMS):
                data = one.recv(MAX_BYTES + 1)
                news = unpacked(self._secret, data, size=self._size)
                if news is None or news.number < self._told[news.rank][0]:
                    continue
                states = self._told[news.rank][1]
                self._told[news.rank] = (news.number, states)
                states.update({state.operation: state for state in news.states})
                self._begun += [state.operation for state in news.states if state.operation not in self._begun]

    def _line(self, number: int) -> "_Line":
        states = [told[number] for _, told in self._told if number in told]
        rows = [state.num_rows or 0 for state in states]
        running = sum(state.is_running for state in states)
        sent, spilled = (sum(sizes) for sizes in zip(*(state[4:] for state in states), strict=True))
        numbers = {
            "rows": f"{sum(rows):,} rows" if sum(rows) else "",
            "sent": f"sent {size_of(sent)}" if sent else "",
            "spilled": f"spilled {size_of(spilled)}" if spilled else "",
            "skew": f"skew {max(rows) * self._size / sum(rows):.2f}" if sum(rows) else "",
            "state": f"runs on {running} of {self._size}" if running else "idle",
        }
        return states[0].words, bool(running), numbers


_Line = tuple[str, bool, dict[str, str]]


@final
class _Drawing:
    """Bars on the terminal; what the program and the ranks write meanwhile goes by above them."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        words = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
        numbers = [
            TextColumn(f"{{task.fields[{name}]}}", markup=False, table_column=Column(no_wrap=True, justify="right"))
            for name in ("rows", "sent", "spilled", "skew", "state")
        ]
        self._bars: Any = Progress(
            BarColumn(bar_width=8),
            words,
            *numbers,
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            expand=True,
        )
        self._bars.start()

    def draw(self, lines: Sequence[_Line]) -> None:
        """Draws a line for each operation; idle ones that began first go where there is no room for all."""
        room = max(1, self._bars.console.height - _ROOM)
        idle = [number for number, (_, is_running, _) in enumerate(lines) if not is_running]
        hidden = set(idle[: max(0, len(lines) - room)])
        shown = [line for number, line in enumerate(lines) if number not in hidden][-room:]
        while len(self._bars.tasks) < len(shown):
            self._bars.add_task("", total=None, rows="", sent="", spilled="", skew="", state="")
        for task, (words, is_running, numbers) in zip(self._bars.tasks, shown, strict=False):
            # A bar without a total moves to and fro; `update` would keep the one before.
            task.total = None if is_running else 1
            self._bars.update(task.id, description=words, completed=task.total or 0, **numbers)
        for task in self._bars.tasks[len(shown) :]:  # the terminal has fewer lines than before
            self._bars.remove_task(task.id)
        self._bars.refresh()

    def close(self) -> None:
        """Takes the bars away."""
        self._bars.stop()
