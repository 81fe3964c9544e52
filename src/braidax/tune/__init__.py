"""How overlaps interfere, and which mix of them is best: measured, planned, and controlled while a run goes on."""

from typing import TYPE_CHECKING

from braidax.first_use import at_first_use

if TYPE_CHECKING:
    from braidax.tune.attribution import (
        LANES,
        Attribution,
        Lane,
        StepTime,
        TracePart,
        attribute,
        gather_traces,
        merge_traces,
    )
    from braidax.tune.calibration.calibrate import calibrate
    from braidax.tune.calibration.identity import Identity
    from braidax.tune.calibration.rates import Calibration, Copies, Cores, Disk
    from braidax.tune.control.diary import Diary, Entry
    from braidax.tune.control.limits import PRIORITIES, Limits, Priority, limits_of
    from braidax.tune.control.tuner import Tuner
    from braidax.tune.knobs.live import LiveKnob, apply_knobs, controllers_paused, hot_knobs, read_knobs
    from braidax.tune.knobs.rebuilding import checkpointer_options, fit_options, loader_options, parallelize_options
    from braidax.tune.planning import plan
    from braidax.tune.search.cluster import Cluster, Overheads
    from braidax.tune.search.finding import Found
    from braidax.tune.trials.climbing import Climb, Setting, Trial, climb
    from braidax.tune.trials.running import Course, try_settings

__all__ = [
    "LANES",
    "PRIORITIES",
    "Attribution",
    "Calibration",
    "Climb",
    "Cluster",
    "Copies",
    "Cores",
    "Course",
    "Diary",
    "Disk",
    "Entry",
    "Found",
    "Identity",
    "Lane",
    "Limits",
    "LiveKnob",
    "Overheads",
    "Priority",
    "Setting",
    "StepTime",
    "TracePart",
    "Trial",
    "Tuner",
    "apply_knobs",
    "attribute",
    "calibrate",
    "checkpointer_options",
    "climb",
    "controllers_paused",
    "fit_options",
    "gather_traces",
    "hot_knobs",
    "limits_of",
    "loader_options",
    "merge_traces",
    "parallelize_options",
    "plan",
    "read_knobs",
    "try_settings",
]

# All of it is imported at its first use: a run that is not tuned needs none.
_HOMES = {
    "LANES": "attribution",
    "Attribution": "attribution",
    "Lane": "attribution",
    "StepTime": "attribution",
    "TracePart": "attribution",
    "attribute": "attribution",
    "gather_traces": "attribution",
    "merge_traces": "attribution",
    "calibrate": "calibration.calibrate",
    "Identity": "calibration.identity",
    "Calibration": "calibration.rates",
    "Copies": "calibration.rates",
    "Cores": "calibration.rates",
    "Disk": "calibration.rates",
    "Diary": "control.diary",
    "Entry": "control.diary",
    "PRIORITIES": "control.limits",
    "Limits": "control.limits",
    "Priority": "control.limits",
    "limits_of": "control.limits",
    "Tuner": "control.tuner",
    "LiveKnob": "knobs.live",
    "apply_knobs": "knobs.live",
    "controllers_paused": "knobs.live",
    "hot_knobs": "knobs.live",
    "read_knobs": "knobs.live",
    "checkpointer_options": "knobs.rebuilding",
    "fit_options": "knobs.rebuilding",
    "loader_options": "knobs.rebuilding",
    "parallelize_options": "knobs.rebuilding",
    "Cluster": "search.cluster",
    "Overheads": "search.cluster",
    "Found": "search.finding",
    "plan": "planning",
    "Climb": "trials.climbing",
    "Setting": "trials.climbing",
    "Trial": "trials.climbing",
    "climb": "trials.climbing",
    "Course": "trials.running",
    "try_settings": "trials.running",
}

__getattr__ = at_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
