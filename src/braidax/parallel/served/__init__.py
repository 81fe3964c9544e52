"""Tables that servers have in their host memory: rows are pulled ahead of the gradients, and gradients pushed back."""
