"""Workers that each have a JAX of their own, and train variables that servers have."""
