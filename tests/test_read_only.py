"""A working folder in which nothing may be written: reading goes on, and what would write says what to do."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import braidax as bx
from braidax.cli.run_options import check_folder
from braidax.report.metrics_file import MetricsFile
from braidax.spans import Span

NOBODY = 65534


@contextmanager
def read_only() -> Generator[Path, None, None]:
    """Makes a folder the working one, in which this process may write nothing, also where it is root's."""
    before, is_root = Path.cwd(), os.geteuid() == 0
    folder = Path(tempfile.mkdtemp())  # that of pytest lets no other user in
    try:
        np.savez(folder / "train.npz", x=np.arange(6))
        os.chdir(folder)
        folder.chmod(0o555)
        if is_root:
            os.setresuid(NOBODY, NOBODY, 0)
        yield folder
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
        folder.chmod(0o755)
        os.chdir(before)
        shutil.rmtree(folder)


def test_what_would_write_says_what_to_do() -> None:
    trace = bx.Trace()
    trace.record(Span("compute", "step", "main", 0.0, 1.0, 0))
    with tempfile.TemporaryDirectory() as warm:  # what is imported late is there, and readable, before
        bx.Checkpointer(warm, bx.Every(1)).close()
        np.savez(Path(warm) / "train.npz", x=np.arange(6))
        assert len(list(bx.open(f"{warm}/train.npz"))) == 6
    with read_only() as folder:
        source = bx.open("train.npz")
        assert [int(sample["x"]) for sample in source] == [0, 1, 2, 3, 4, 5]
        with pytest.raises(bx.errors.CheckpointError) as caught:
            bx.Checkpointer("runs", bx.Every(8))
        assert str(caught.value).endswith("give another path, or change its permissions")
        assert f"path='{folder}/runs': expected a folder that this process may create and write to" in str(caught.value)
        with pytest.raises(bx.errors.ArgumentError) as caught:
            MetricsFile(Path("runs/metrics.jsonl"), 0)
        assert str(caught.value).startswith("metrics='runs/metrics.jsonl' cannot be written (Permission denied): ")
        with pytest.raises(bx.errors.ArgumentError) as caught:
            trace.save("trace.json")
        assert str(caught.value) == (
            "path='trace.json': the trace cannot be written (Permission denied); expected a file in a folder that is "
            "there: give another path, or change its permissions"
        )
        with pytest.raises(bx.errors.ArgumentError) as caught:
            check_folder(Path("runs/digits"))
        assert str(caught.value).endswith(
            f"nothing can be written to {folder}; give another folder, or change its mode"
        )
        assert [path.name for path in folder.iterdir()] == ["train.npz"]
