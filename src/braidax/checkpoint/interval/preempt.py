"""`Preemption`: a last checkpoint when the processes are asked to end."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Literal, final

import jax
from jax.experimental import multihost_utils

from braidax.errors import ArgumentError, CheckpointError


@final
class Preemption:
    """Says, inside a `with` block, after which update to take a last checkpoint because of SIGTERM.

    ```
    with bx.Preemption(within_seconds=30.0) as preemption:
        for batch in loader:
            ...
            saver.update((state, loader.cursor))
            if preemption.due(saver.num_updates):
                saver.save((state, loader.cursor))
                break
    ```

    The first SIGTERM is kept for `due` to ask about, and gives the signal back to whoever had it, so that a second one
    does what it would do without this block: by default it ends the process at once. Elsewhere than on the main
    thread, where Python lets nobody handle signals, it does nothing.

    After `jax.distributed.initialize`, which takes SIGTERM for itself, `due` asks JAX: it is enough that one process is
    told, and within about a second all of them agree on a step that none has come to yet. Until that step further
    signals are swallowed.

    **Arguments:** `within_seconds`: from the signal (under `jax.distributed`: from the step that was agreed on) to the
    end of the process, for `seconds_left`.
    """

    def __init__(self, within_seconds: float = 30.0) -> None:
        if not 0 < within_seconds < threading.TIMEOUT_MAX:
            raise ArgumentError(f"within_seconds={within_seconds!r}: expected a finite number of seconds > 0")
        self.within_seconds = within_seconds
        self._told: float | None = None
        self._asks: Literal["nobody", "signal", "jax"] = "nobody"
        self._before: Any = None

    def due(self, step: int) -> bool:
        """Returns whether a last checkpoint is to be taken; from that step on it stays so.

        Nothing is waited for, but for the agreement once a process has been told. Under `jax.distributed` the answer is
        the same on all processes if all ask after each step, with the same numbers.

        **Arguments:** `step`: of the update that was last made, such as `saver.num_updates`.

        **Raises:** `CheckpointError` where JAX's service for it has been switched off.
        """
        if self._told is None and self._asks == "jax" and _is_agreed(step):
            self._told = time.monotonic()
            if _is_main():  # JAX has no use for the signal any more; Python knows who had it before
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
        return self._told is not None

    @property
    def seconds_left(self) -> float:
        """What is left of `within_seconds`, at least 0; all of it before the signal."""
        since = 0.0 if self._told is None else time.monotonic() - self._told
        return max(0.0, self.within_seconds - since)

    def __enter__(self) -> "Preemption":
        if jax.distributed.is_initialized():
            self._asks = "jax"
        elif _is_main():
            self._before = signal.getsignal(signal.SIGTERM)
            if self._before is None:
                raise CheckpointError(
                    "SIGTERM is handled by something that is not Python and could not be given back: expected a "
                    "handler that signal.getsignal knows; take that one away, or use no Preemption"
                )
            signal.signal(signal.SIGTERM, self._keep)
            self._asks = "signal"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._asks == "signal" and self._told is None:
            signal.signal(signal.SIGTERM, self._before)
        self._asks = "nobody"

    def _keep(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, self._before)
        self._told = time.monotonic()


def _is_agreed(step: int) -> bool:
    try:
        return multihost_utils.reached_preemption_sync_point(step)
    except RuntimeError as error:
        raise CheckpointError(
            f"processes cannot agree on a last checkpoint: {error} Expected the option jax_enable_preemption_service "
            "to be on when jax.distributed.initialize is called: leave it on, or use no Preemption"
        ) from error


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
