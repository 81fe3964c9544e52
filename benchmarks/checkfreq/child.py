"""A process of its own: what it needs in memory to save, or one that trains until it is killed.

`python -m benchmarks.checkfreq.child memory|train SYSTEM FOLDER DISTANCE SIZE` with SIZE `full` or `quick`.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path

from benchmarks.checkfreq.costs import finish_behind, save_behind
from benchmarks.checkfreq.systems import SYSTEMS
from benchmarks.checkfreq.training import FULL, QUICK, Size, Trainer

NONE = "none"
_SIZES = {"full": FULL, "quick": QUICK}


def main() -> int:
    act, system, folder, distance, size = sys.argv[1:]
    logging.getLogger("absl").setLevel(logging.ERROR)
    if act == "memory":
        _say(_peak_bytes(system, Path(folder), int(distance), _SIZES[size]))
    else:
        _train(system, Path(folder), int(distance), _SIZES[size])
    return 0


def _peak_bytes(name: str, folder: Path, num_checkpoints: int, size: Size) -> int:
    """Returns the most memory that was resident while some checkpoints were taken behind training."""
    trainer = Trainer(size)
    system = None if name == NONE else SYSTEMS[name](folder)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    for _ in range(num_checkpoints):
        if system is None:
            for _ in range(4):
                trainer.advance()
        else:
            save_behind(trainer, system)
            finish_behind(trainer, system)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    if system is not None:
        system.close()
    return 1024 * peak


def _train(name: str, folder: Path, distance: int, size: Size) -> None:
    """Trains for ever, and says after every step how many there were; a checkpoint is due every so often."""
    trainer = Trainer(size)
    system = SYSTEMS[name](folder)
    while True:
        if (trainer.num_updates - 2) % distance == 0:
            system.save(trainer.tree)
        trainer.advance(system.before_apply)
        _say(trainer.num_updates)


def _say(value: object) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which ends this process
    sys.exit(main())
