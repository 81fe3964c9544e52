"""What the processes that load together tell each other."""
