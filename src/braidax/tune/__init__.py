"""How overlaps interfere, and which mix of them is best: measured, planned, and controlled while a run goes on."""

from braidax.tune.control.diary import Diary as Diary
from braidax.tune.control.diary import Entry as Entry
from braidax.tune.control.limits import PRIORITIES as PRIORITIES
from braidax.tune.control.limits import Limits as Limits
from braidax.tune.control.limits import Priority as Priority
from braidax.tune.control.limits import limits_of as limits_of
from braidax.tune.control.tuner import Tuner as Tuner
from braidax.tune.knobs.live import LiveKnob as LiveKnob
from braidax.tune.knobs.live import apply_knobs as apply_knobs
from braidax.tune.knobs.live import controllers_paused as controllers_paused
from braidax.tune.knobs.live import hot_knobs as hot_knobs
from braidax.tune.knobs.live import read_knobs as read_knobs
from braidax.tune.knobs.rebuilding import checkpointer_options as checkpointer_options
from braidax.tune.knobs.rebuilding import fit_options as fit_options
from braidax.tune.knobs.rebuilding import loader_options as loader_options
from braidax.tune.knobs.rebuilding import parallelize_options as parallelize_options
from braidax.tune.trials.climbing import Climb as Climb
from braidax.tune.trials.climbing import Setting as Setting
from braidax.tune.trials.climbing import Trial as Trial
from braidax.tune.trials.climbing import climb as climb
from braidax.tune.trials.running import Course as Course
from braidax.tune.trials.running import try_settings as try_settings
