"""Local files that a source takes for remote ones."""

from pathlib import Path
from typing import Any

from braidax.data.storage import Files, LocalFiles


class Remote(Files):
    """Local files that do not say so, as if they were in an object store."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = LocalFiles(paths)
        self.asked: list[Any] = []

    @property
    def names(self) -> Any:
        return self._files.names

    @property
    def sizes(self) -> Any:
        return self._files.sizes

    @property
    def stamps(self) -> Any:
        return self._files.stamps

    def read(self, ranges: Any) -> Any:
        return self._files.read(ranges)

    def prepare(self, ranges: Any) -> None:
        self.asked.append(ranges)
