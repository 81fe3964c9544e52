"""How the touched rows of a table move, read off an optimizer."""
