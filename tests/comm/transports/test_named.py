"""Transports by name, those of other packages included."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from braidax.comm.transports.in_process import Hub, InProcessTransport
from braidax.comm.transports.named import make_transport
from braidax.comm.transports.tcp import TcpTransport
from braidax.comm.transports.ucx import UcxTransport
from braidax.errors import ArgumentError

THEIRS = """
from braidax.comm.transports.in_process import Hub, InProcessTransport

def make():
    return InProcessTransport(Hub())

def mistaken():
    return 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package that brings transports."""
    (tmp_path / "foreign_transport.py").write_text(THEIRS)
    info = tmp_path / "foreign_transport-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-transport\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[braidax.transports]\npigeon = foreign_transport:make\nrock = foreign_transport:mistaken\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "foreign_transport", raising=False)


@pytest.mark.parametrize(("name", "kind"), [("tcp", TcpTransport), ("ucx", UcxTransport)])
def test_ours_go_by_their_names(name: str, kind: Callable[[], object]) -> None:
    transport = make_transport(name)
    assert type(transport) is kind
    assert transport.name == name
    transport.close(timeout_seconds=0)


@pytest.mark.usefixtures("package")
def test_other_packages_add_theirs_by_entry_point() -> None:
    transport = make_transport("pigeon")
    assert isinstance(transport, InProcessTransport)
    transport.close(timeout_seconds=0)
    with pytest.raises(
        ArgumentError, match=r"name='rock': the entry point 'foreign_transport:mistaken' returned a int"
    ):
        make_transport("rock")


@pytest.mark.usefixtures("package")
def test_an_unknown_name_lists_what_there_is() -> None:
    words = r"name='smoke': expected one of \['mpi', 'pigeon', 'rock', 'tcp', 'ucx'\]; .* 'braidax.transports'"
    with pytest.raises(ArgumentError, match=words):
        make_transport("smoke")


def test_ranks_of_one_process_need_a_hub() -> None:
    with pytest.raises(ArgumentError, match=r"make one Hub\(\) and give each rank InProcessTransport\(hub\)"):
        make_transport("in-process")
    transport = InProcessTransport(Hub())
    assert transport.name == "in-process"
    transport.close(timeout_seconds=0)
