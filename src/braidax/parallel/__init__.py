"""Placements, strategies, and the step that they turn single-device code into."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .compiled_step import CompiledStep as CompiledStep
from .given.gradient import value_and_grad as value_and_grad
from .parallelize import parallelize as parallelize
from .plan.costs.machine import Link as Link
from .plan.costs.machine import Machine as Machine
from .plan.costs.measure import measure_machine as measure_machine
from .plan.costs.ring import PlannedRing as PlannedRing
from .plan.layout import Axis as Axis
from .plan.layout import Layout as Layout
from .plan.model import Model as Model
from .plan.parameter_servers import ParameterServers as ParameterServers
from .plan.placements import Gathered as Gathered
from .plan.placements import Placement as Placement
from .plan.placements import Replicated as Replicated
from .plan.placements import Rotated as Rotated
from .plan.placements import Rows as Rows
from .plan.placements import Seen as Seen
from .plan.placements import Served as Served
from .plan.placements import Split as Split
from .plan.plan import Plan as Plan
from .plan.plan import PlannedAxis as PlannedAxis
from .plan.plan import PlannedVariable as PlannedVariable
from .plan.planned.knobs import KNOBS as KNOBS
from .plan.planned.knobs import PLAN_KNOBS as PLAN_KNOBS
from .plan.planned.knobs import CheckpointingKnobs as CheckpointingKnobs
from .plan.planned.knobs import ComputingKnobs as ComputingKnobs
from .plan.planned.knobs import Knob as Knob
from .plan.planned.knobs import LoadingKnobs as LoadingKnobs
from .plan.planned.knobs import PlannedKnobs as PlannedKnobs
from .plan.planned.machine import PlannedMachine as PlannedMachine
from .plan.replaying import anywhere as anywhere
from .plan.replaying import check_plan as check_plan
from .plan.rotated import RotatedTensorParallel as RotatedTensorParallel
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
from .wrapped import Wrapped as Wrapped
from .wrapped import WrappedCall as WrappedCall

if TYPE_CHECKING:
    from .given.averaging import Averages as Averages
    from .given.averaging import averaged as averaged
    from .given.averaging import averaging as averaging
    from .pipelined_step import PipelinedStep as PipelinedStep
    from .served.files.published import Published as Published
    from .served.files.published import read_published as read_published
    from .served.meetings.joining import open_meeting as open_meeting
    from .served.meetings.meeting import Meeting as Meeting
    from .served.step import ServedStep as ServedStep
    from .stages.pipeline import Pipeline as Pipeline
    from .workers.step import WorkerStep as WorkerStep

_LATE = {
    "Averages": "braidax.parallel.given.averaging",
    "averaged": "braidax.parallel.given.averaging",
    "averaging": "braidax.parallel.given.averaging",
    "Pipeline": "braidax.parallel.stages.pipeline",
    "PipelinedStep": "braidax.parallel.pipelined_step",
    "Meeting": "braidax.parallel.served.meetings.meeting",
    "Published": "braidax.parallel.served.files.published",
    "ServedStep": "braidax.parallel.served.step",
    "WorkerStep": "braidax.parallel.workers.step",
    "open_meeting": "braidax.parallel.served.meetings.joining",
    "read_published": "braidax.parallel.served.files.published",
}


def __getattr__(name: str) -> Any:
    """Imports what is for pipelines and servers at its first use: few have them, and it is as large as all the rest."""
    if name not in _LATE:
        raise AttributeError(f"module 'braidax.parallel' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
