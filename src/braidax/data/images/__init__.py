"""Images: decoded, cropped and resized, whole windows of them without the GIL."""
