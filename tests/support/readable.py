"""Whether a file or a socket can be read: of any number, while `select` takes only the first 1,024 of a process."""

import select
from typing import Protocol


class HasNumber(Protocol):
    def fileno(self) -> int: ...


def is_readable(file: HasNumber, seconds: float = 0.0) -> bool:
    """Returns whether something is there to be read, or comes in time."""
    waiting = select.poll()
    waiting.register(file.fileno(), select.POLLIN)
    return bool(waiting.poll(1000 * seconds))
