"""A Polars plan as data: its nodes, its expressions, what crosses an exchange."""
