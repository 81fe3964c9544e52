"""Images: decoded, resized, augmented."""
