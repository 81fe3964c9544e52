"""Pipelines that cut themselves: how well they are balanced, and how fast they are beside the peers'."""
