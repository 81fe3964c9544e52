"""Connections between processes: where each listens, how others reach it, and how both know whom they talk to."""
