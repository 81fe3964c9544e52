"""Records of any length, found by an index."""
