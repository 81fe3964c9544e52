"""OpenCV without its words about a damaged image, which the error that names the image makes superfluous."""

import threading
from types import ModuleType, TracebackType
from typing import final

_SILENT = 0


@final
class Quiet:
    """Keeps OpenCV from logging while any thread is in its `with` block; then its level is again what it was."""

    def __init__(self, cv2: ModuleType) -> None:
        self._set_level = cv2.setLogLevel if hasattr(cv2, "setLogLevel") else cv2.utils.logging.setLogLevel  # since 5
        self._lock = threading.Lock()
        self._num_inside, self._level = 0, _SILENT

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._level = self._set_level(_SILENT)
            self._num_inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._set_level(self._level)
