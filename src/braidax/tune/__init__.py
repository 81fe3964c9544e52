"""Where the time of a step goes, and what is the best mix of all that overlaps."""

from .attribution import LANES, Attribution, Lane, StepTime, TracePart, attribute, gather_traces, merge_traces

__all__ = ["LANES", "Attribution", "Lane", "StepTime", "TracePart", "attribute", "gather_traces", "merge_traces"]
