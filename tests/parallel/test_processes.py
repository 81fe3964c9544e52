"""Two processes with four devices each compute what one with eight does."""

import json
import os
import socket
import subprocess
import sys

import numpy as np

from tests.laws.tree import ROOT
from tests.parallel.one_of_two import losses


def test_two_processes_equal_one() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.one_of_two", str(rank), str(port)],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outcomes = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=10)
    expected = losses()
    for process, (out, errors) in zip(processes, outcomes, strict=True):
        assert process.returncode == 0, errors
        np.testing.assert_allclose(json.loads(out.splitlines()[-1]), expected, rtol=1e-5)
