"""What a plan says, as data."""
