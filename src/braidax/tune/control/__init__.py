"""The tuner that runs beside a loop: moves what may change while it runs, and takes back what does not help."""
