"""A run of a study, as its folder keeps it."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from braidax.errors import ArgumentError
from braidax.tune.attribution import LANES

from .factors import Setting


@dataclass(frozen=True)
class Use:
    """What a step takes besides its time, on average.

    **Fields:** `core_seconds`: of all cores, by all processes that train. `num_cores`: that these may use.
    `saving_seconds`: in which a checkpoint was copied or written. `waited_seconds`: of these, in which devices had
    nothing to do, as the loop waited for that.
    """

    core_seconds: float
    num_cores: float
    saving_seconds: float
    waited_seconds: float


@dataclass(frozen=True)
class Run:
    """What was measured of a setting in a block.

    **Fields:** `step_seconds`: the mean over all steps that count, those with a checkpoint too. `lanes`: its parts, by
    lane. `steps`: seconds of each step that counts, in order. `use`: None of a run that was kept without.
    """

    block: int
    setting: Setting
    step_seconds: float
    lanes: Mapping[str, float]
    steps: tuple[float, ...]
    use: Use | None = None

    def to_line(self) -> str:
        """Returns it as a line of JSON."""
        fields: dict[str, Any] = {
            "block": self.block,
            "setting": self.setting.to_dict(),
            "step_seconds": self.step_seconds,
            "lanes": dict(self.lanes),
            "steps": list(self.steps),
        }
        if self.use is not None:
            fields["use"] = asdict(self.use)
        return json.dumps(fields) + "\n"

    @staticmethod
    def from_line(line: str, where: str) -> "Run":
        """Returns what `to_line` has written. **Arguments:** `where`: file and line. **Raises:** `ArgumentError`."""
        try:
            found = cast("dict[str, Any]", json.loads(line))
            lanes = {lane: float(found["lanes"][lane]) for lane in LANES}
            steps = tuple(float(one) for one in found["steps"])
            seconds = float(found["step_seconds"])
            use = None if found.get("use") is None else Use(**{name: float(one) for name, one in found["use"].items()})
            used = () if use is None else asdict(use).values()
            if not all(math.isfinite(one) and one >= 0 for one in (seconds, *lanes.values(), *steps, *used)):
                raise ValueError("it has a number that is no time")
            if use is not None and not use.num_cores:
                raise ValueError("it has no cores")
            return Run(int(found["block"]), Setting(**found["setting"]), seconds, lanes, steps, use)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"{where} has {line[:60]!r}, which is no run of a study ({error}): remove that line, and what it had "
                "is measured again"
            ) from error
