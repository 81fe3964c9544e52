"""Hosts that are network namespaces: what they send is counted, and what they are called is theirs alone."""

import socket
import subprocess
import sys

import pytest

from benchmarks.harness import namespaces
from benchmarks.harness.namespaces import Network, reason_against

_SEND = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(1000), (sys.argv[1], 9))"


def test_what_a_host_sends_is_counted_and_its_name_is_that_of_its_address() -> None:
    if reason := reason_against():
        pytest.skip(reason)
    with Network(2) as network:
        network.name_hosts()
        before = network.sent(0)
        subprocess.run([*network.prefix(0), sys.executable, "-c", _SEND, network.addresses[1]], check=True, timeout=30)
        assert 1000 <= network.sent(0) - before < 5000
        for host, address in enumerate(network.addresses):
            told = subprocess.check_output([*network.prefix(host), "getent", "hosts", socket.gethostname()], timeout=30)
            assert told.split()[0].decode() == address
        folders = [namespaces._OWN_FILES / host for host in network.hosts]
        assert all(folder.is_dir() for folder in folders)
    assert not any(folder.exists() for folder in folders)
