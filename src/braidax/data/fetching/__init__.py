"""Windows of batches, read unordered into fixed slots."""
