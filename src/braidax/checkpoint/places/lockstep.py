"""Parts of files that processes read from one another, while each does something else with them."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, final

from braidax.checkpoint.messages import Messages

_WISH = struct.Struct("<QQQ")  # the file, where to begin, how many bytes
_DONE = b"done"


@final
class Lockstep:
    """Reads from files that others have, in rounds that all processes go through together.

    In each round a process may ask another one for some bytes, and answers who asks it. `finish` goes on answering
    until nobody asks any more; so all call it, whatever happened.

    **Arguments:** `messages`: nobody else's meanwhile. `serve`: returns bytes of a file that this process has: given
    the number of the file, where to begin, and how many bytes.
    """

    def __init__(self, messages: Messages, serve: Callable[[int, int, int], bytes]) -> None:
        self._messages = messages
        self._serve = serve

    def read(self, holder: int, file: int, memory: memoryview, start: int) -> int:
        """Fills memory from a file that another process has. **Returns:** how many bytes came."""
        wishes = [b""] * self._messages.size
        wishes[holder] = _WISH.pack(file, start, len(memory))
        _, replies = self._round(wishes)
        found = memoryview(replies[holder])
        memory[: len(found)] = found
        return len(found)

    def finish(self) -> None:
        """Answers the others until all have called this."""
        asked: Sequence[bytes] = [b""]
        while any(wish != _DONE for wish in asked):
            asked, _ = self._round([_DONE] * self._messages.size)

    def _round(self, wishes: Sequence[bytes]) -> tuple[list[bytes], list[Any]]:
        asked = [bytes(wish) for wish in self._messages.all_to_all(wishes)]
        answers = [self._serve(*_WISH.unpack(wish)) if len(wish) == _WISH.size else b"" for wish in asked]
        return asked, self._messages.all_to_all(answers)
