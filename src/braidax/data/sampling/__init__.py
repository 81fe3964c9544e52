"""Which samples, in which order, with which random numbers."""
