"""A nursery of processes that save and are killed: `python -m tests.support.checkpoint.crashing FOLDER`.

It has imported everything and started nothing, so a process that it forks begins in a moment. An order on stdin is a
line of JSON, `{"seed", "num_processes"}`; the answer is one, of how it went.
"""

import json
import mmap
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from braidax.checkpoint import Checkpointer, Every, checkpointer
from braidax.checkpoint.places import persist
from braidax.checkpoint.places.retention import Retention
from braidax.checkpoint.snapshot.hold import Held

PHASES = ("step", "snapshot", "write", "commit", "cleanup")
"""What a process that saves is busy with, as far as its checkpoint goes."""

_WATCH_SECONDS = 2.0  # until a phase is given up that a seed aims at
SHAPES = {"split": (64, 2048), "replicated": (32, 1024), "small": (3,)}


def begin() -> dict[str, Any]:
    """The content of the state before the first step."""
    return {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}


def advance(content: Any, step: int) -> Any:
    """One step, element by element, so that parts of arrays may take it as well."""
    return content * np.float32(1.0001) + np.float32(step)


def note_phases(note: Callable[[int], None]) -> None:
    """Has this process note the phase that it is in, also for those who look at it when it is dead."""

    def mark(owner: Any, name: str, during: str, behind: str) -> None:
        original = getattr(owner, name)

        def marked(*arguments: Any, **keywords: Any) -> Any:
            note(PHASES.index(during))
            result = original(*arguments, **keywords)
            note(PHASES.index(behind))
            return result

        setattr(owner, name, marked)

    mark(checkpointer, "hold", "snapshot", "snapshot")
    mark(Held, "copy", "snapshot", "step")
    mark(persist, "write", "write", "commit")
    mark(persist, "commit", "commit", "step")
    mark(Retention, "apply", "cleanup", "step")


def save_until_killed(folder: Path, process: int, num_processes: int, port: int, progress: int) -> None:
    """Goes on from the newest checkpoint, with one after every step, and tells each step that is over."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    if num_processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process, cluster_detection_method="deactivate")
    mesh = Mesh(np.array(jax.devices()), ("a",))
    shardings = {name: NamedSharding(mesh, P("a" if name == "split" else None)) for name in SHAPES}

    def made(parts: dict[str, Any]) -> dict[str, Any]:
        return {
            name: jax.make_array_from_single_device_arrays(
                shape, shardings[name], [jax.device_put(parts[name][device], device) for device in mesh.local_devices]
            )
            for name, shape in SHAPES.items()
        }

    def parts_of(state: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {shard.device: np.array(shard.data) for shard in state[name].addressable_shards} for name in SHAPES
        }

    whole = begin()
    first = {
        name: {
            device: whole[name][index]
            for device, index in shardings[name].addressable_devices_indices_map(shape).items()
        }
        for name, shape in SHAPES.items()
    }
    saver = Checkpointer(folder, Every(1), keep=2, timeout_seconds=60.0)
    step, state = saver.restore((0, made(first)))
    if saver.skipped:
        raise AssertionError(saver.skipped)
    while True:
        step += 1
        moved = parts_of(state)
        state = made(
            {name: {device: advance(part, step) for device, part in parts.items()} for name, parts in moved.items()}
        )
        saver.update((step, state))
        os.write(progress, step.to_bytes(4, "little"))


def trial(folder: Path, seed: int, num_processes: int) -> dict[str, Any]:
    """Starts processes, kills one or all of them at a moment that the seed decides, and then the rest.

    The moment is anywhere, or soon after one of the phases of a checkpoint has begun.
    """
    moments = random.Random(seed)
    phases = mmap.mmap(-1, num_processes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told, tell = os.pipe()
    pids = [_fork(folder, process, num_processes, port, tell, phases) for process in range(num_processes)]
    os.close(tell)
    victims = moments.choice([pids, *([pid] for pid in pids)])
    num_told, last = moments.randrange(1, 10 * num_processes), 0
    for _ in range(num_told):
        word = os.read(told, 4)
        if not word:
            break
        last = max(last, int.from_bytes(word, "little"))
    aim = moments.choice(PHASES)
    if aim == "step":
        _spin(moments.random() * 0.03, lambda: False)
    else:
        watched = 0 if aim == "cleanup" else pids.index(victims[0])  # process 0 alone cleans up
        _spin(_WATCH_SECONDS, lambda: phases[watched] == PHASES.index(aim))
        _spin(moments.choice([0.0, 0.0003, 0.003]) * moments.random(), lambda: False)
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    time.sleep(moments.random() * 0.05)
    for pid in pids:
        if pid not in victims:
            os.kill(pid, signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    while word := os.read(told, 4):
        last = max(last, int.from_bytes(word, "little"))
    os.close(told)
    return {
        "seed": seed,
        "num_processes": num_processes,
        "killed": [pids.index(pid) for pid in victims],
        "phases": [PHASES[phase] for phase in phases[:]],
        "last": last,
        "statuses": statuses,
        "left": {path.name: sorted(file.name for file in path.iterdir()) for path in folder.glob(".step*")},
    }


def _spin(seconds: float, until: Callable[[], bool]) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and not until():
        pass


def _fork(folder: Path, process: int, num_processes: int, port: int, progress: int, phases: mmap.mmap) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            note_phases(lambda phase: phases.__setitem__(process, phase))
            save_until_killed(folder, process, num_processes, port, progress)
        except BaseException:  # noqa: BLE001 - nothing of a child may go on as its parent
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def main() -> None:
    """Does what it is told until there is no more."""
    for line in sys.stdin:
        order = json.loads(line)
        sys.stdout.write(json.dumps(trial(Path(sys.argv[1]), order["seed"], order["num_processes"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
