"""A nursery of processes that save in three places and are killed.

It is `python -m tests.support.checkpoint.crashing_places FOLDER`. An order on stdin is a line of JSON, the number of
the call in which the process that it forks dies; the answer is a line, of how it went.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from braidax.checkpoint import Checkpointer, Every, Folder, Neighbors


class Alone:
    """Messages of a process that is the only one."""

    rank, size, hosts = 0, 1, ("here",)
    timeout_seconds = 60.0

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the value."""
        return [value]

    def all_to_all(self, parts: Sequence[Any]) -> list[Any]:
        """Returns the part."""
        return list(parts)

    def send(self, value: Any, dest: int, *, tag: int = 0) -> None:
        """Has nobody to send to."""
        raise AssertionError(dest)

    def recv(self, source: int, *, tag: int = 0) -> Any:
        """Has nobody to receive from."""
        raise AssertionError(source)


def opened(folder: Path) -> Checkpointer:
    """Saves after each update, in memory and on a disk, and every other time on another one."""
    places = [
        Neighbors(folder / "memory", Alone()),
        Folder(folder / "quick", keep=2),
        Folder(folder / "lasting", every=2, keep=1),
    ]
    return Checkpointer(places, Every(1), timeout_seconds=60.0)


def state_at(step: int) -> dict[str, Any]:
    """What is saved at an update."""
    return {"step": step, "x": jnp.full(40_000, step, jnp.float32)}


def save_until_killed(folder: Path, countdown: int, progress: int) -> None:
    """Goes on from what is there, tells each update that is over, and dies in one of the calls that change a disk."""
    jax.config.update("jax_platforms", "cpu")
    saver = opened(folder)
    step = saver.restore(state_at(0))["step"]
    left = [countdown]

    def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    os.fsync, os.unlink, Path.rename = deadly(os.fsync), deadly(os.unlink), deadly(Path.rename)
    while True:
        step += 1
        saver.update(state_at(step))
        os.write(progress, step.to_bytes(4, "little"))


def main() -> None:
    """Does what it is told until there is no more."""
    for line in sys.stdin:
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                save_until_killed(Path(sys.argv[1]), json.loads(line), tell)
            except BaseException:  # noqa: BLE001 - nothing of a child may go on as its parent
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(tell)
        last = 0
        while word := os.read(told, 4):
            last = int.from_bytes(word, "little")
        os.close(told)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(json.dumps({"last": last, "status": status}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
