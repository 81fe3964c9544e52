"""What a batch waits for when several processes load it together."""

import math
from concurrent.futures import Future
from dataclasses import dataclass, field

from braidax.errors import WaitTimeout


@dataclass
class Confirmation:
    """Whether all processes have read their part of a batch.

    **Fields:** `future`: done when they have. `deadline`: until when somebody waits for it, `time.monotonic` seconds;
    as long as nobody does, there is no limit: loops pause, and one process may be further ahead than another.
    """

    future: "Future[None]" = field(default_factory=Future[None])
    deadline: float = math.inf

    def wait(self, *, timeout_seconds: float, what: str) -> None:
        """Waits until all have read their part. **Raises:** what another process raised; `WaitTimeout`."""
        try:
            self.future.result(timeout=timeout_seconds)
        except TimeoutError as error:
            if self.future.done():
                raise
            raise WaitTimeout(
                f"this process has read its part of {what}, but did not hear within {timeout_seconds:g} s that the "
                "others have: one may hang or be cut off; look at their logs, or raise Knobs(timeout_seconds=...)"
            ) from error
