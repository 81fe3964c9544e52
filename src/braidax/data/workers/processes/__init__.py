"""Worker processes that read windows of a source into shared memory, for code that holds the GIL."""

from braidax.data.workers.processes.in_processes import InProcesses as InProcesses
from braidax.data.workers.processes.in_processes import in_processes as in_processes
