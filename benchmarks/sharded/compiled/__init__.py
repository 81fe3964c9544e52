"""Programs that are compiled, and not run: for machines that are not here, by an earlier version; and plans."""
