"""Compiled programs: for machines that are not here, and what the text of any of them says."""
