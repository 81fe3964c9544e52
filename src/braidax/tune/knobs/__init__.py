"""Knobs of a plan on what runs: read off it, set while it goes on, and made into what constructors take."""
