"""Cutting a traced loss into a chain of stages: where it is narrow, and what each stage is made of."""
