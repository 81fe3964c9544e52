"""Rotated tensor parallelism beside everything else that divides the samples, or the weights, or both."""
