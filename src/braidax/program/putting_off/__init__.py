"""Sums over devices that are put off: until then each device has its part."""
