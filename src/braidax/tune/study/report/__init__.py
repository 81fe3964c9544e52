"""What a study shows: a page, a poster, tables."""

from .written import Written, write_report

__all__ = ["Written", "write_report"]
