"""What all systems are asked to do: in Polars' verbs, in SQL, and in pandas' API."""
