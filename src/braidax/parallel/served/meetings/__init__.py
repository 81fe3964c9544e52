"""Where servers and those who train meet, and how each comes there."""
