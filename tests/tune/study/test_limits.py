"""Limits of what trains: read from a text, set by the kernel, taken away."""

import io
import os
import pickle
import signal
from pathlib import Path

import pytest

from braidax.cores import usable_cores
from braidax.errors import ArgumentError
from braidax.gang.launch import launch_here
from braidax.gang.program import Program
from braidax.tune.study import Limits, parse_limits
from braidax.tune.study.limits import Confined

ROOT = os.geteuid() == 0


def test_limits_are_read_from_a_text() -> None:
    assert parse_limits(None) == Limits()
    assert parse_limits("memory=2G,cores=1,disk=50M,network=100M") == Limits(2 << 30, 1.0, 50 << 20, 100_000_000)
    assert str(parse_limits("cores=0.5,network=1.5G")) == "0.5 cores, network 1500 Mbit/s"
    assert str(Limits()) == "none"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("speed=1", "--limit speed=1: 'speed' is no limit, or there twice; expected some of memory=2G"),
        ("cores=1,cores=2", "'cores' is no limit, or there twice"),
        ("memory=lots", "--limit memory=lots: 'lots' is no number above 0, such as 50M"),
        ("disk=-1M", "'-1M' is no number above 0, such as 50M"),
        ("cores=1M", "'1M' is no number above 0, such as 1"),
        ("memory=1M", "limit memory=1048576 bytes: JAX alone takes 512M; allow more"),
        ("cores=4096", "limit cores=4096: expected more than 0, up to the"),
    ],
)
def test_limits_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        parse_limits(text)
    assert words in str(raised.value)


def test_whole_cores_need_no_root(tmp_path: Path) -> None:
    with Confined(Limits(cores=1), tmp_path) as confined:
        assert len(confined.confinement.cores) == 1
        assert confined.confinement.groups == ()
        code = "import os; confinement.enter(); print(len(os.sched_getaffinity(0)))"
        assert _asked(code, confined.confinement, tmp_path) == "1"
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_what_cannot_be_set_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without control groups, and without iproute2."""
    monkeypatch.setattr("braidax.tune.study.control_groups._ROOT", tmp_path / "nowhere")
    with pytest.raises(
        ArgumentError, match=r"limit memory cannot be set .*; run it as root on Linux with control groups"
    ):
        Confined(Limits(memory_bytes=1 << 30), tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArgumentError, match=r"limit network cannot be set .*; run it as root on Linux with iproute2"):
        Confined(Limits(network_bits_per_second=10**8), tmp_path)


def _usable(limits: Limits, folder: Path) -> str:
    """Returns why the kernel here does not set such limits, or nothing."""
    if not ROOT:
        return "it needs root"
    try:
        Confined(limits, folder).close()
    except ArgumentError as error:
        return str(error)
    return ""


def test_memory_is_held_down_by_the_kernel(tmp_path: Path) -> None:
    limits = Limits(memory_bytes=512 << 20)
    if why := _usable(limits, tmp_path):
        pytest.skip(why)
    with Confined(limits, tmp_path) as confined:
        groups = [Path(entry).parent for entry in confined.confinement.groups]
        code = "confinement.enter(); x = bytearray(1 << 30); print('all there')"
        assert _asked(code, confined.confinement, tmp_path) == "killed"
        assert all(group.exists() for group in groups)
    assert not any(group.exists() for group in groups)


def test_a_network_has_a_bandwidth_of_its_own(tmp_path: Path) -> None:
    """2 MB over 40 Mbit/s take 0.4 s, of which the bucket gives some at once."""
    limits = Limits(network_bits_per_second=40_000_000)
    if why := _usable(limits, tmp_path):
        pytest.skip(why)
    with Confined(limits, tmp_path) as confined:
        assert confined.confinement.network is not None
        assert float(_asked(_SENDING, confined.confinement, tmp_path)) > 0.25
        network = Path(confined.confinement.network)
        assert network.exists()
    assert not network.exists()


_SENDING = """
import socket, threading, time
confinement.enter()
listening = socket.create_server(("127.0.0.1", 0))
def read():
    connection, _ = listening.accept()
    while connection.recv(1 << 16):
        pass
reading = threading.Thread(target=read)
reading.start()
begun = time.perf_counter()
with socket.create_connection(listening.getsockname()) as sending:
    sending.sendall(bytes(2_000_000))
reading.join()
print(time.perf_counter() - begun)
"""


def _asked(code: str, confinement: object, folder: Path) -> str:
    """Returns what a process prints that runs a text, in which `confinement` is one."""
    script, log = folder / "asked.py", io.StringIO()
    script.write_text(f"import pickle\nconfinement = pickle.loads({pickle.dumps(confinement)!r})\n{code}\n")
    ended = launch_here(Program(str(script), initialize="nothing"), 1, log=log)
    if ended == 128 + signal.SIGKILL:
        return "killed"
    assert ended == 0, log.getvalue()
    return log.getvalue().removeprefix("[0] ").strip()
