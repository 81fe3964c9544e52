"""Pictures as pages of HTML that need nothing else: no script, no font, no server; for light screens and dark ones."""
