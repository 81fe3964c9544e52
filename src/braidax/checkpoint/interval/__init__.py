"""How often checkpoints are taken, and when the last one is."""
