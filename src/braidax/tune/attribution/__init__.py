"""Where the time of a step goes."""

from .attribute import attribute
from .step_time import LANES, Attribution, Lane, StepTime

__all__ = ["LANES", "Attribution", "Lane", "StepTime", "attribute"]
