"""The cases of `braidax study`: models and data of the ready-made tasks, at sizes that a small machine can run."""
