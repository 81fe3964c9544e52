"""Units of a program that are computed as the parts of their weights come by."""
