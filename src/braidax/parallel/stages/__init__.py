"""Pipelines: a program cut into stages, which lie on devices of their own."""
