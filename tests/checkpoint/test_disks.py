"""A disk that is full, and one that is read-only: the errors, and that the checkpoint before survives."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tree import ROOT

LIMIT = 120
OWN_MOUNTS = ["unshare", "--mount", "--map-root-user"]
SAVE = """
import json, subprocess, sys
from pathlib import Path
import numpy as np
from braidax.checkpoint import Checkpointer, Every, restore
from braidax.errors import CheckpointError

def told(call):
    try:
        call()
    except CheckpointError as error:
        return str(error)

def names():
    return sorted(path.name for path in root.iterdir())

root = Path(sys.argv[1]) / "run"
small, large = {"x": np.arange(300_000)}, {"x": np.arange(900_000)}  # 2.4 MB and 7.2 MB
said = {}
with Checkpointer(root, Every(1), keep=1) as saver:
    saver.update(small)
    saver.update(large)  # waits for the one before; both together are more than the disk holds
    said["full"] = told(lambda: saver.save(small))
    said["left"] = names()
    said["kept"] = bool((saver.restore({"x": np.zeros(300_000, int)})["x"] == small["x"]).all())
    saver.update({"x": small["x"] + 1})
said["after"] = names()
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
said["read-only"] = told(lambda: Checkpointer(root, Every(1)))
said["missing"] = told(lambda: Checkpointer(root.parent / "other", Every(1)))
found = restore(root, {"x": np.zeros(300_000, int)})
said["read"] = [found.step, bool((found.tree["x"] == small["x"] + 1).all())]
print(json.dumps(said))
"""


def test_a_full_or_read_only_disk_is_told_and_the_checkpoint_before_survives(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run([*OWN_MOUNTS, "true"], capture_output=True, timeout=LIMIT).returncode:
        pytest.skip("needs file systems of its own: Linux, and a user who may mount in a namespace")
    # A file system of 8 MB that nobody else sees, and that is gone with its last process.
    mounted = 'mount -t tmpfs -o size=8m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    ended = subprocess.run(
        [*OWN_MOUNTS, "sh", "-c", mounted, "sh", disk, sys.executable, SAVE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["full"] == (
        f"{disk}/run/step-00000002: the checkpoint could not be written: [Errno 28] No space left on device; make room "
        "or mend the disk. Earlier checkpoints are untouched"
    )
    assert said["left"] == [".lock", "step-00000001"]
    assert said["kept"]
    assert said["after"] == [".lock", "step-00000002"]
    for case, path, refused in (
        ("read-only", disk / "run", disk / "run" / ".lock"),
        ("missing", disk / "other", disk / "other"),
    ):
        assert said[case] == (
            f"path='{path}': expected a folder that this process may create and write to, got: [Errno 30] Read-only "
            f"file system: '{refused}'; give another path, or change its permissions"
        )
    assert said["read"] == [2, True]
