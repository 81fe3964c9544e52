"""Arrays on their way from stage to stage, within a process and between processes."""
