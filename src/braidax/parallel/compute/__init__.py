"""What a step computes: gradients, their accumulation, and the update."""
