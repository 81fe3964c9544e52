"""A process of a group: binds itself to its cores, makes its system, and then does what it is asked."""

import importlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main(module: str, descriptor: str, cores: str) -> None:
    """Serves until the other side closes.

    **Arguments:** `module`: with `begin`. `descriptor`: of the socket. `cores`: numbers, with commas between.
    """
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})  # before threads are there
    control = Connection(int(descriptor))
    begin: Any = importlib.import_module(module).begin
    place, args = control.recv()
    system = _told(control, lambda: begin(place, *args), answer=False)
    while True:
        name, args = control.recv()
        _told(control, lambda name=name, args=args: getattr(system, name)(*args))


def _told(control: Connection, run: Any, *, answer: bool = True) -> Any:
    """Runs something, and sends what it gave, or why it did not."""
    found, why = None, ""
    try:
        found = run()
    except Exception as error:  # noqa: BLE001 (told to the other side)
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    control.send((found if answer else None, why))
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which ends its processes
    try:
        main(*sys.argv[1:])
    except (EOFError, ConnectionError):
        os._exit(0)
