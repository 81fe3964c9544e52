"""What libraries write that is no line of the program's: Gloo to stdout when processes have met over CPU collectives,
and JAX to stderr at SIGTERM, of which the program says itself what it does."""

import re
from collections.abc import Generator, Iterable
from typing import Literal, final

_BEGIN = "[Gloo] Rank "
_PIECES = re.compile(
    rf"(?:{re.escape(_BEGIN)}|\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : )*"
)
_TERMINATED = re.compile(r"W\d{4} [\d:.]+ +\d+ preemption_notifier\.cc:\d+\] SIGTERM caught at .*")
_COUNTS = re.compile(r"connected to (\d+) peer ranks\. Expected number of connected peer ranks is : (\d+)")


@final
class Greetings:
    """Leaves out the greetings of one process, a line for each of its devices.

    Several threads write them at once, piece by piece, so that a line may hold pieces of several and later ones none.
    As many lines are left out as greetings have begun. One that counts fewer peers than it expects stays.
    """

    def __init__(self) -> None:
        self._owed = 0  # ends of greetings that have begun

    def left(self, stream: Literal["stdout", "stderr"], lines: Iterable[str]) -> Generator[str, None, None]:
        """Yields the other lines. **Arguments:** `stream`: that they were written to."""
        for line in lines:
            if stream == "stdout" and self._is_greeting(line):
                self._owed += line.count(_BEGIN) - 1
            elif stream == "stdout" or _TERMINATED.fullmatch(line.rstrip()) is None:
                yield line

    def _is_greeting(self, line: str) -> bool:
        if not self._owed and not line.startswith(_BEGIN):
            return False
        is_whole = all(there == expected for there, expected in _COUNTS.findall(line))
        return is_whole and _PIECES.fullmatch(line) is not None
