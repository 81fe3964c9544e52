"""How overlaps interfere, and which mix of them is best: measured, planned, and controlled while a run goes on."""

from braidax.tune.attribution import LANES as LANES
from braidax.tune.attribution import Attribution as Attribution
from braidax.tune.attribution import Lane as Lane
from braidax.tune.attribution import StepTime as StepTime
from braidax.tune.attribution import TracePart as TracePart
from braidax.tune.attribution import attribute as attribute
from braidax.tune.attribution import gather_traces as gather_traces
from braidax.tune.attribution import merge_traces as merge_traces
from braidax.tune.control.diary import Diary as Diary
from braidax.tune.control.diary import Entry as Entry
from braidax.tune.control.limits import PRIORITIES as PRIORITIES
from braidax.tune.control.limits import Limits as Limits
from braidax.tune.control.limits import Priority as Priority
from braidax.tune.control.limits import limits_of as limits_of
from braidax.tune.control.tuner import Tuner as Tuner
from braidax.tune.search.cluster import Cluster as Cluster
from braidax.tune.search.finding import Found as Found
from braidax.tune.search.finding import plan as plan
from braidax.tune.trials.climbing import Climb as Climb
from braidax.tune.trials.climbing import Setting as Setting
from braidax.tune.trials.climbing import Trial as Trial
from braidax.tune.trials.climbing import climb as climb
from braidax.tune.trials.running import Course as Course
from braidax.tune.trials.running import try_settings as try_settings
