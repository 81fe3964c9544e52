"""Placements, strategies, and the step that they turn single-device code into."""

from .gradient import value_and_grad as value_and_grad
from .ids import Measured as Measured
from .ids import measure_touched as measure_touched
from .parallelize import parallelize as parallelize
from .placements import Placement as Placement
from .placements import Replicated as Replicated
from .placements import Rows as Rows
from .plan import Plan as Plan
from .plan import PlannedAxis as PlannedAxis
from .plan import PlannedVariable as PlannedVariable
from .state import State as State
from .step import Lowered as Lowered
from .step import Step as Step
from .strategies import DataParallel as DataParallel
from .strategies import Hybrid as Hybrid
from .strategies import Strategy as Strategy
from .strategies import Variable as Variable
from .touched import Touched as Touched
from .train_step import TrainStep as TrainStep
