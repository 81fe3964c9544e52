"""Text: tokenized, padded, packed."""
