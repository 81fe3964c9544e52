"""Whole programs: what their users see when one rank of three ends, and that nothing of them stays."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.comm.faults.crew import START_SECONDS, Crew
from tests.support.comm.faults.trials import PEER_TIMEOUT_SECONDS, SLACK_SECONDS, check_after
from tests.support.readable import is_readable
from tests.support.tree import ROOT

PROGRAM = """
import sys
import numpy as np
from braidax.comm import FileStore, Tuning, connect

rank, tuning = int(sys.argv[2]), Tuning(peer_timeout_seconds=2, host="host-" + sys.argv[2])
with connect(FileStore(sys.argv[1]), rank=rank, size=3, job="program", tuning=tuning) as comm:
    print("joined", flush=True)
    if rank == 1 and sys.argv[3] == "raise":
        comm.barrier()
        raise ValueError("no such column")
    comm.barrier()
    while True:
        comm.all_reduce(np.ones(50_000))
"""


@contextlib.contextmanager
def programs(folder: Path, how: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts one program for each rank; all have joined."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, folder, str(rank), how],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for program in started:
            assert program.stdout is not None
            assert is_readable(program.stdout, START_SECONDS)
            assert program.stdout.readline() == "joined\n"
        yield started
    finally:
        for program in started:
            program.kill()
            program.communicate()


@pytest.mark.parametrize(
    ("how", "last_line"),
    [
        ("kill", "braidax.errors.PeerLost: rank 1 (host host-1) is lost: "),
        pytest.param(
            "stop",
            "braidax.errors.PeerLost: rank 1 (host host-1) is lost: nothing came from it for 2 s",
            marks=pytest.mark.slow,
        ),
        ("raise", "braidax.errors.Aborted: rank 1 (host host-1) ended the generation: ValueError: no such column"),
    ],
    ids=["kill", "stop", "raise"],
)
def test_programs_end_with_the_error_as_their_last_line(how: str, last_line: str, tmp_path: Path) -> None:
    with programs(tmp_path, how) as started:
        if how != "raise":
            os.kill(started[1].pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        for rank in (0, 2):
            _, said = started[rank].communicate(timeout=PEER_TIMEOUT_SECONDS + SLACK_SECONDS + 5)
            assert (started[rank].returncode, said.splitlines()[-1][: len(last_line)]) == (1, last_line)
        if how == "raise":
            _, said = started[1].communicate(timeout=10)
            assert (started[1].returncode, said.splitlines()[-1]) == (1, "ValueError: no such column")


def test_killed_while_ranks_join(tmp_path: Path) -> None:
    """Others may be anywhere between the store and the first barrier: they end at the limit, and never hang."""
    check_joining(tmp_path, range(3))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_while_ranks_join_many_times(tmp_path: Path) -> None:
    check_joining(tmp_path, range(100, 150))


def check_joining(folder: Path, seeds: range) -> None:
    limit = 3.0
    with Crew(folder, size=3, spares=1) as crew:
        for seed in seeds:
            draw = random.Random(seed)
            victim = draw.randrange(3)
            crew.join(
                3,
                seed=seed,
                transport="tcp",
                hosts=["a", "b", "c"],
                victim=victim,
                stances=["idle"] * 3,
                num_operations=None,
                spin_seconds=0.0,
                timeout_seconds=limit,
                peer_timeout_seconds=PEER_TIMEOUT_SECONDS,
                relay=None,
            )
            began = time.monotonic()
            time.sleep(draw.uniform(0, 0.1))
            crew.members[victim].kill()
            texts: list[str] = []
            for rank in {0, 1, 2} - {victim}:
                told = crew.members[rank].hear("ended", seconds=limit + SLACK_SECONDS + 5, skipped="joined")
                assert told["error"] in ("PeerLost", "WaitTimeout", "HandshakeError", "Aborted"), told
                texts.append(told["text"])
                assert told["at"] - began < limit + SLACK_SECONDS, told
                assert (told["threads"], told["descriptors"]) == ([], []), told
                if told["during"] != "connect":
                    assert told["error"] == "PeerLost", told
                    check_after(told, "PeerLost", str(told))
            # One may wait for another that hears of it at the limit, and name that one.
            assert any(re.search(rf"\branks? {victim}\b", text) for text in texts), texts
            crew.replace(victim)
