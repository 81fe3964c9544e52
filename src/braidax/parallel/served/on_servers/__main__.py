"""A server that `braidax launch --servers` has started: it serves one step after the other, until its job ends it."""

import os
import signal
import sys
from types import FrameType
from typing import final

from braidax.errors import BraidaxError
from braidax.gang.program import IN_PLACE, SERVER
from braidax.lifeline import LIFELINE, end_with
from braidax.parallel.served.meetings.launched import await_call, await_place, note_joins

from .serving import serve_as


@final
class _Termination:
    """Ends this process when it is told to: at once while nobody needs it, otherwise behind those who do."""

    def __init__(self) -> None:
        self.is_due = self.is_needed = False
        signal.signal(signal.SIGTERM, self._told)

    def _told(self, number: int, frame: FrameType | None) -> None:
        self.is_due = True
        if not self.is_needed:
            sys.exit(0)


def main() -> None:
    """Serves as the environment says. It ends by SIGTERM, when those who train have taken their last checkpoint."""
    if LIFELINE in os.environ:
        end_with(int(os.environ.pop(LIFELINE)))
    termination, rank = _Termination(), int(os.environ[SERVER])
    number, meeting, generation = await_place(rank) if IN_PLACE in os.environ else (0, await_call(0), 0)
    while True:
        termination.is_needed = True
        try:
            note_joins(number, rank)
            serve_as(rank, meeting, generation)
        except BraidaxError:
            if not generation:
                raise
            number, meeting, generation = await_place(rank)  # others have not come, and go on without it
            continue
        finally:
            termination.is_needed = False
        if termination.is_due:
            break
        number, generation = number + 1, 0
        meeting = await_call(number)


if __name__ == "__main__":
    main()
