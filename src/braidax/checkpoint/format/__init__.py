"""What is on disk, and how a tree becomes that and comes back from it; from and to the formats of others."""
