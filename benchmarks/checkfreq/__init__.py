"""Checkpoints: what they cost a training loop, how often one can afford them, and what a failure then costs."""
