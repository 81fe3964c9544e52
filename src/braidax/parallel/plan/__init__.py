"""What is decided for every variable before anything runs: placements, strategies, the plan."""
