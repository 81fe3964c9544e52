"""Tables that are larger than a rank's memory: what does not fit waits on disk, in partitions."""
