"""Placements, strategies, and the step that they turn single-device code into."""

from .given.gradient import value_and_grad as value_and_grad
from .parallelize import parallelize as parallelize
from .plan.layout import Axis as Axis
from .plan.layout import Layout as Layout
from .plan.model import Model as Model
from .plan.placements import Gathered as Gathered
from .plan.placements import Placement as Placement
from .plan.placements import Replicated as Replicated
from .plan.placements import Rows as Rows
from .plan.placements import Split as Split
from .plan.plan import Plan as Plan
from .plan.plan import PlannedAxis as PlannedAxis
from .plan.plan import PlannedVariable as PlannedVariable
from .plan.strategies import DataParallel as DataParallel
from .plan.strategies import FullySharded as FullySharded
from .plan.strategies import Hybrid as Hybrid
from .plan.strategy import Choice as Choice
from .plan.strategy import Strategy as Strategy
from .plan.tensor import TensorParallel as TensorParallel
from .rows.ids import Measured as Measured
from .rows.ids import measure_touched as measure_touched
from .rows.touched import Touched as Touched
from .state import State as State
from .step import Lowered as Lowered
from .step import Step as Step
from .train_step import TrainStep as TrainStep
