"""How far apart checkpoints are, within the limits of a run, by what they are measured to cost."""

from typing import final

from braidax.checkpoint import Checkpointer
from braidax.checkpoint.interval.adaptive import Adapting, choose
from braidax.tune.control.diary import Entry
from braidax.tune.control.limits import Limits

_LARGE, _SMALL = 1.25, 1.1  # times as far apart, or as close: less is noise, and less than the first one, too, if once
KNOB = "saver.spacing.num_updates"


@final
class SpacingControl:
    """Sets how far apart the checkpoints of an `Adaptive` interval are; those of `Every` stay as they were asked for.

    **Arguments:** `saver`: whose. `limits`: of the run. Of several processes the first one decides.
    """

    def __init__(self, saver: Checkpointer, limits: Limits) -> None:
        self._saver, self._limits = saver, limits
        self._asked = 0  # by the window before: 1 for further apart, -1 for closer

    def decide(self, step: int) -> Entry | None:
        """Moves them after a window, and returns what to write of it; None where all stays.

        A quarter further apart or closer is moved at once, a tenth when two windows one after the other ask for it, and
        any less where more work could be lost than allowed.
        """
        spacing = self._saver.spacing
        if not isinstance(spacing, Adapting) or spacing.verdict.bound == "probe":
            return None
        found = spacing.estimate()
        if found is None:
            spacing.paused, self._asked = False, 0  # what was known holds no more: it measures anew
            return None
        spacing.paused = True
        wanted, before = choose(self._limits.interval, found), spacing.num_updates
        ratio = wanted.num_updates / before
        asked = (ratio >= _SMALL) - (ratio <= 1 / _SMALL)
        is_noise = not asked or (1 / _LARGE < ratio < _LARGE and asked != self._asked)
        breaks_promise = wanted.bound == "lost work" and wanted.num_updates < before
        self._asked = asked
        if is_noise and not breaks_promise:
            return None
        self._asked = 0
        spacing.num_updates = wanted.num_updates
        return Entry(step, KNOB, before, wanted.num_updates, "set", str(wanted))

    def close(self) -> None:
        """Leaves them to themselves again."""
        spacing = self._saver.spacing
        if isinstance(spacing, Adapting):
            spacing.paused = False
