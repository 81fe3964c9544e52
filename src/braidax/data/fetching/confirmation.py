"""What a batch waits for when several processes load it together."""

import math
from concurrent.futures import Future
from dataclasses import dataclass, field


@dataclass
class Confirmation:
    """Whether all processes have read their part of a batch.

    **Fields:** `future`: done when they have. `deadline`: until when somebody waits for it, `time.monotonic` seconds;
    as long as nobody does, there is no limit: loops pause, and one process may be further ahead than another.
    """

    future: "Future[None]" = field(default_factory=Future[None])
    deadline: float = math.inf
