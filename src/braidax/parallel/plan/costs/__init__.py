"""What placements cost: tables by rows, and the choice between replicated, gathered and rotated variables."""
