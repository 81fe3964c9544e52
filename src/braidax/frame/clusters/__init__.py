"""Tables of Dask and of Ray, handed over on the workers where they lie."""
