"""Variables whose gradient is dense, and how they lie on the mesh: passes over a traced loss."""
