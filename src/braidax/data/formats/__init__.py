"""Sources: one file a format."""
