"""What a loader is given, opened, and closed with it."""

import contextlib
from pathlib import Path
from typing import Any, Literal

import jax

from braidax.data.multihost.meeting import ProcessGroup
from braidax.data.open import open as open_source
from braidax.data.source import Source, is_varying
from braidax.data.transforms.skipping import skipping
from braidax.data.workers.processes.in_processes import InProcesses, in_processes
from braidax.data.written import WritesArrow, Written, write, write_once
from braidax.errors import ArgumentError

OnError = Literal["raise", "skip"]
Workers = Literal["threads", "processes"]


class Given:
    """The source that a loader reads.

    **Arguments:** `source`, `workers`, `on_error`: as of `DataLoader`. `group`: the processes that load together.
    `timeout_seconds`: of what reads, and between processes.

    **Raises:** what opening does; `ArgumentError` for samples that have a leaf of varying size.
    """

    def __init__(
        self,
        source: Source | str | Path | Any,
        group: ProcessGroup | None,
        *,
        workers: Workers,
        on_error: OnError,
        timeout_seconds: float,
    ) -> None:
        self._processes: InProcesses | None = None
        self._written: Written | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if isinstance(source, Source):
                opened = source
            elif isinstance(source, WritesArrow):
                alone = group is None
                self._written = write(source) if alone else write_once(source, group, timeout_seconds=timeout_seconds)
                opened = self._written.source
            else:
                opened = open_source(source)
            _check_fixed(opened)
            if workers == "processes":
                self._processes = in_processes(opened, timeout_seconds=timeout_seconds)
                opened = self._processes
            if on_error not in ("raise", "skip"):
                raise ArgumentError(f"on_error={on_error!r} is not 'raise' or 'skip'")
            self.source: Source = skipping(opened) if on_error == "skip" else opened
            undo.pop_all()

    def close(self) -> None:
        """Ends processes, and lets go of a table that was written for this loader. A second call does nothing."""
        try:
            if self._processes is not None:
                self._processes.close()
        finally:
            if self._written is not None:
                self._written.close()


def _check_fixed(source: Source) -> None:
    """Raises `ArgumentError` when samples have a leaf of varying size."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(source.sample_spec):
        if is_varying(leaf):
            raise ArgumentError(
                f"source={type(source).__name__} has the leaf {jax.tree_util.keystr(path)}, whose size varies from "
                "sample to sample, but the arrays of a batch have one shape: tokenize, pad, pack or decode it "
                "(braidax.data.tokenized, padded, packed, decoded), turn it into arrays of one shape with "
                "open(transform=...), or leave it out with open(columns=...)"
            )
