"""Which knob to turn next: the one that may help with what a step waits for, and that has not failed lately."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from braidax.tune.control.hot import HotKnob
from braidax.tune.control.windows import Window

_WAITS = 0.02  # of a step's time, from which on it is waited for data
_FIRST_REST = 8  # windows, after a move that did not help; twice as many after each further one
_MAX_DOUBLINGS = 7


@dataclass(frozen=True)
class Move:
    """One knob, turned by one value.

    **Fields:** `knob`, `direction`: ±1. `before`, `after`: its values. `why`: in words.
    """

    knob: HotKnob
    direction: int
    before: int
    after: int
    why: str


@final
class Moves:
    """Proposes moves, and remembers which of them did not help.

    **Arguments:** `knobs`: that may be turned.
    """

    def __init__(self, knobs: Sequence[HotKnob]) -> None:
        self._knobs = {knob.name: knob for knob in knobs}
        self._num_windows = 0
        self._num_failed: dict[tuple[str, int], int] = {}
        self._rests_until: dict[tuple[str, int], int] = {}

    def propose(self, window: Window) -> Move | None:
        """Returns the move to try after a window, None where there is nothing to try."""
        self._num_windows += 1
        for name, direction, why in self._wanted(window):
            knob = self._knobs.get(name)
            if knob is None or self._rests_until.get((name, direction), 0) > self._num_windows:
                continue
            after = knob.beside(direction)
            if after is not None:
                return Move(knob, direction, knob.read(), after, why)
        return None

    def tell(self, move: Move, *, helped: bool) -> None:
        """Takes note of what became of a move: one that did not help rests, and the way back from one that did."""
        way, back = (move.knob.name, move.direction), (move.knob.name, -move.direction)
        if helped:
            self._num_failed.pop(way, None)
            self._rest(back)
        else:
            self._rest(way)

    def forget(self) -> None:
        """Lets all be tried again: the run has changed."""
        self._num_failed.clear()
        self._rests_until.clear()

    def _rest(self, way: tuple[str, int]) -> None:
        failed = self._num_failed[way] = self._num_failed.get(way, 0) + 1
        self._rests_until[way] = self._num_windows + (_FIRST_REST << min(failed - 1, _MAX_DOUBLINGS))

    def _wanted(self, window: Window) -> Iterator[tuple[str, int, str]]:
        waits = f"{100 * window.wait:.0f} % of the time is waited for data"
        if window.wait > _WAITS:
            yield "loader.threads", 1, waits
            yield "loader.prefetch", 1, waits
            yield "loader.threads", -1, f"{waits}, and fewer threads may read faster"
        else:
            yield "loader.threads", -1, "nothing is waited for, and threads may take cores from the step"
            yield "loader.prefetch", -1, "nothing is waited for, and batches in flight take memory"
