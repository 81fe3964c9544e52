"""Updates of single stages, for schedules that do not flush."""
