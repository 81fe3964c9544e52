"""Tries damaged data sets one after another, in little memory: `python -m tests.support.data.fuzz.child FOLDER`.

Each line of input is the name of a case and the numbers of its mutations. For each it says what it is before it begins,
and then what came of it; so whoever reads this knows of which mutation the process died.
"""

import gc
import json
import os
import resource
import signal
import sys
from pathlib import Path

from braidax.data.storage.limits import LIMIT
from tests.support.data.fuzz.cases import CASES
from tests.support.data.fuzz.trial import FINE, cleared, damaged, samples, tried

MEMORY_BYTES = 1 << 30  # beyond what the process needs for the case as it was written
MAX_BYTES = 64 << 20  # that compressed data may become
TRIAL_SECONDS = 60  # of a busy machine; a trial takes a few milliseconds


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _lift_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _say(*words: object) -> None:
    print(json.dumps(words), flush=True)  # noqa: T201 (what the parent reads)


def main(folder: Path) -> None:
    """Answers until the input ends."""
    os.environ[LIMIT] = str(MAX_BYTES)
    for line in sys.stdin:
        name, numbers = json.loads(line)
        case = CASES[name]
        signal.alarm(TRIAL_SECONDS)
        _lift_limit()  # a library that gets no memory for its threads may wait for them for ever
        whole = cleared(folder / "whole")
        whole.mkdir(parents=True)
        case.write(whole)
        written = samples(case.opened(whole)) if case.read is None else case.read(whole)
        assert tried(case, whole, written) in FINE, f"{name}: is not read as it was written"
        signal.alarm(0)
        _limit_memory()
        for number in numbers:
            place = cleared(folder / f"mutant-{number}")
            what = damaged(case, number, whole, place)
            _say("begins", number, what)
            signal.alarm(TRIAL_SECONDS)
            outcome = tried(case, place, written)
            signal.alarm(0)
            cleared(place)
            _say("ended", number, outcome)
            if number % 16 == 0:
                gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
