"""A few trials over what needs a rebuild: one knob at a time, from where a run stands."""
