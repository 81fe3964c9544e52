"""Metrics for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from braidax.errors import ArgumentError, import_extra
from braidax.report.pace import Done, rates


class TensorBoard:
    """Event files, in which steps that are done again hide what was written of them before.

    **Arguments:** `folder`: made if it is missing. `first_step`: steps done before this session.

    **Raises:** `MissingExtra`; `ArgumentError` for a path that cannot be a folder.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        module = import_extra("tensorboardX", "tensorboard", purpose="writing TensorBoard event files")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(
                f"tensorboard={str(folder)!r} cannot be made ({error.strerror}): expected a folder; give another path"
            ) from error
        self._writer = module.SummaryWriter(str(folder), purge_step=first_step + 1)

    def step(self, done: Done) -> None:
        """Adds the metrics of a step."""
        self.note(done.step, done.epoch, {**done.metrics, **rates(done.pace)})

    def note(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Adds values."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def say(self, line: str) -> None:
        """Writes nothing: it is for people."""

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()
