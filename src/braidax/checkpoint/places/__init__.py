"""Where checkpoints are kept: a folder, a bucket, the memory of neighbors."""
