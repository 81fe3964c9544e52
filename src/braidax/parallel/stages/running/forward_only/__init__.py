"""Functions of a state that are only computed, not differentiated: what a step evaluates, and what it wraps."""
