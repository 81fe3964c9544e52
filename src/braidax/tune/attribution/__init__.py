"""Where the time of a step goes."""

from .attribute import attribute
from .gathering import TracePart, gather_traces, merge_traces
from .step_time import LANES, Attribution, Lane, StepTime

__all__ = ["LANES", "Attribution", "Lane", "StepTime", "TracePart", "attribute", "gather_traces", "merge_traces"]
