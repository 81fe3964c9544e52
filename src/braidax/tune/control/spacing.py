"""How far apart checkpoints are, within the limits of a run, by what they are measured to cost."""

from typing import final

from braidax.checkpoint import Checkpointer
from braidax.checkpoint.interval.adaptive import Adapting, choose
from braidax.tune.control.diary import Entry
from braidax.tune.control.limits import Limits

_HYSTERESIS = 1.25  # times as far apart, or as close: less is noise, but where more work could be lost than allowed
KNOB = "saver.spacing.num_updates"


@final
class SpacingControl:
    """Sets how far apart the checkpoints of an `Adaptive` interval are; those of `Every` stay as they were asked for.

    **Arguments:** `saver`: whose. `limits`: of the run. Of several processes the first one decides.
    """

    def __init__(self, saver: Checkpointer, limits: Limits) -> None:
        self._saver, self._limits = saver, limits

    def decide(self, step: int) -> Entry | None:
        """Moves them after a window, and returns what to write of it; None where all stays."""
        spacing = self._saver.spacing
        if not isinstance(spacing, Adapting) or spacing.verdict.bound == "probe":
            return None
        found = spacing.estimate()
        if found is None:
            spacing.paused = False  # what was known holds no more: it measures anew
            return None
        spacing.paused = True
        wanted, before = choose(self._limits.interval, found), spacing.num_updates
        is_noise = 1 / _HYSTERESIS < wanted.num_updates / before < _HYSTERESIS
        breaks_promise = wanted.bound == "lost work" and wanted.num_updates < before
        if is_noise and not breaks_promise:
            return None
        spacing.num_updates = wanted.num_updates
        return Entry(step, KNOB, before, wanted.num_updates, "set", str(wanted))

    def close(self) -> None:
        """Leaves them to themselves again."""
        spacing = self._saver.spacing
        if isinstance(spacing, Adapting):
            spacing.paused = False
