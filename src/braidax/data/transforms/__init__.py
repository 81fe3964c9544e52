"""Sources that wrap sources."""
