"""Where the time of steps went: seconds by lane, a step at a time and on average."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from braidax.errors import ArgumentError

Lane = Literal[
    "data wait",
    "dispatch",
    "snapshot stall",
    "persist interference",
    "exposed communication",
    "bubble",
    "compute",
    "other",
]
"""What the time of a step goes to."""

LANES: tuple[Lane, ...] = get_args(Lane)
"""All lanes, in the order of a step."""

_FORMAT = "braidax attribution 1"
_REMEDY = "expected what Attribution.to_json returned; attribute the trace anew"


@dataclass(frozen=True)
class StepTime:
    """Where the wall time of one step went.

    **Fields:** `step`: its number, from 1. `seconds`: from the end of the step before to its own. `lanes`: seconds by
    `Lane`, each 0 or more, which add up to `seconds`. `compiles`: whether it is the first of a session.
    """

    step: int
    seconds: float
    lanes: Mapping[str, float]
    compiles: bool = False


@dataclass(frozen=True)
class Attribution:
    """Where the time of steps went; print it for a table. **Fields:** `steps`: in the order in which they ended."""

    steps: tuple[StepTime, ...]

    @property
    def counted(self) -> tuple[StepTime, ...]:
        """The steps that means are of: all but the first of each session, which compiles."""
        return tuple(step for step in self.steps if not step.compiles)

    def mean(self) -> dict[str, float]:
        """Returns the seconds a step by lane, which add up to `step_seconds`; all 0 where no step is counted."""
        counted = self.counted
        return {lane: math.fsum(step.lanes[lane] for step in counted) / max(1, len(counted)) for lane in LANES}

    @property
    def step_seconds(self) -> float:
        """Seconds a step, on average."""
        return math.fsum(step.seconds for step in self.counted) / max(1, len(self.counted))

    def share(self) -> dict[str, float]:
        """Returns each lane's share of a step, from 0 to 1."""
        total = self.step_seconds
        return {lane: seconds / total if total else 0.0 for lane, seconds in self.mean().items()}

    def summary(self) -> str:
        """Returns one line, such as `step 21.3 ms: compute 78 %, data wait 12 %`; what is below 1 % is left out."""
        shares = sorted(self.share().items(), key=lambda each: -each[1])
        told = ", ".join(f"{lane} {100 * share:.0f} %" for lane, share in shares if share >= 0.01)
        return f"step {_milliseconds(self.step_seconds)}: {told}" if told else "no step behind the first one"

    def __str__(self) -> str:
        mean, shares = self.mean(), self.share()
        width = max(map(len, LANES))
        lines = [f"{'lane':<{width}}  {'a step':>11}  {'share':>7}"]
        lines += [f"{lane:<{width}}  {_milliseconds(mean[lane]):>11}  {100 * shares[lane]:>5.1f} %" for lane in LANES]
        lines.append(f"{'step':<{width}}  {_milliseconds(self.step_seconds):>11}  mean of {len(self.counted)} steps")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns it as text."""
        steps = [
            {"step": one.step, "seconds": one.seconds, "compiles": one.compiles, "lanes": dict(one.lanes)}
            for one in self.steps
        ]
        return json.dumps({"format": _FORMAT, "steps": steps})

    @staticmethod
    def from_json(text: str) -> "Attribution":
        """Returns what `to_json` has written. **Raises:** `ArgumentError` for any other text."""
        try:
            found: Any = json.loads(text)
        except ValueError as error:
            raise ArgumentError(f"text is no JSON ({error}): {_REMEDY}") from error
        kind = cast("dict[str, Any]", found).get("format") if isinstance(found, dict) else None
        if kind != _FORMAT:
            raise ArgumentError(f"text has the format {kind!r}, not {_FORMAT!r}: {_REMEDY}")
        steps: Any = found.get("steps")
        if not isinstance(steps, list):
            raise ArgumentError(f"text has steps of type {type(steps).__name__}: {_REMEDY}")
        return Attribution(tuple(_step(at, one) for at, one in enumerate(cast("list[Any]", steps))))


def _step(at: int, found: Any) -> StepTime:
    try:
        step, seconds, compiles, lanes = found["step"], found["seconds"], found["compiles"], found["lanes"]
        numbers = [seconds, *(lanes[lane] for lane in LANES)]
        is_one = type(step) is int and type(compiles) is bool and len(lanes) == len(LANES)
        is_one = is_one and all(type(one) in (int, float) and math.isfinite(one) and one >= 0 for one in numbers)
    except (KeyError, TypeError):
        is_one = False
    if not is_one:
        raise ArgumentError(f"text has steps[{at}]={found!r}, with no number, seconds >= 0 and lanes: {_REMEDY}")
    return StepTime(
        found["step"], float(found["seconds"]), {lane: float(found["lanes"][lane]) for lane in LANES}, found["compiles"]
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms" if seconds < 1 else f"{1000 * seconds:,.0f} ms"
