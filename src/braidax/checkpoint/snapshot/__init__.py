"""From devices to host memory: what a process writes of a tree, and a copy of it that nobody else can change."""
