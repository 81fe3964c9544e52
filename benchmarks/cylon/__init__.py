"""Frames: joins, group-bys, sorts and TPC-H of ours, beside other frames on the same cores."""
