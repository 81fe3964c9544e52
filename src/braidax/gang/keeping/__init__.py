"""What the ranks of a gang keep between calls, under names."""
