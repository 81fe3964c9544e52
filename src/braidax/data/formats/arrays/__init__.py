"""Samples of one size: arrays, tokens, fixed-width records."""
