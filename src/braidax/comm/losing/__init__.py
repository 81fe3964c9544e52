"""Ranks that are lost one by one, in a world of `on_loss="peer"`."""
