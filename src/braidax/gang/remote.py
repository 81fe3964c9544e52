"""What runs on each host of `braidax launch --hosts`: it starts that host's ranks, and ends them with its own input.

The launching machine starts it over ssh. The first line of its input says what to start: arguments could be read by
anybody on the host. Lines of ranks go out with their prefix, which begins with `[`; a line that begins with `{` tells
of a rank that failed. What ends then is decided by the launching machine.
"""

import contextlib
import json
import os
import selectors
import sys
from dataclasses import asdict
from typing import Any

from braidax.gang.processes import Command, Ending, Processes, print_lines

GRACE_SECONDS = 5.0
"""Between the signals that end the ranks of a host."""


def order(commands: list[tuple[tuple[str, ...], dict[str, str], str]], folder: str) -> bytes:
    """Returns what to write to the input of this program.

    **Arguments:** `commands`: for each rank the arguments of Python, the variables besides those of the host, and the
    prefix of its lines, which begins with `[`. `folder`: the working directory.
    """
    return json.dumps({"commands": commands, "folder": folder}).encode() + b"\n"


def read_report(line: str) -> Ending | None:
    """Returns how a rank failed, if a line tells that; its `number` counts the ranks of the host."""
    if not line.startswith("{"):
        return None
    told: dict[str, Any] = json.loads(line)
    told["log"] = tuple(told["log"])
    return Ending(**told)


def main() -> None:
    """Serves one order until its ranks have ended or its input has; exits as the first rank that failed did."""
    ordered = json.loads(sys.stdin.buffer.readline())
    prefixes = [prefix for _, _, prefix in ordered["commands"]]
    commands = [
        Command((sys.executable, *arguments), {**os.environ, **environment}, ordered["folder"])
        for arguments, environment, _ in ordered["commands"]
    ]
    processes = Processes(commands, write=print_lines(prefixes), grace_seconds=GRACE_SECONDS)
    try:
        failed = _serve(processes, len(commands))
    finally:
        processes.end()
    sys.exit(0 if failed is None else failed.exit_code)


def _serve(processes: Processes, num_alive: int) -> Ending | None:
    """Reports the ranks that fail, until all have ended or the input has, and returns the first."""
    first: Ending | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(processes, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while num_alive:
            ready = {key.fileobj for key, _ in selector.select()}
            for ending in processes.wait(timeout_seconds=0) if processes in ready else []:
                num_alive -= 1
                if ending.status != 0:
                    first = first or ending
                    _report(ending)
            if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
                break
    return first


def _report(ending: Ending) -> None:
    with contextlib.suppress(OSError):  # the connection is gone, and so is the input
        sys.stdout.write(json.dumps(asdict(ending)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
