"""The addresses of this host."""

import ipaddress
import subprocess
import sys

import pytest

from braidax.connections.hosts import host_addresses, host_id
from braidax.errors import ArgumentError


def test_addresses_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_ADDRESS", "10.0.0.7, fd00::7,")
    assert host_addresses() == ["10.0.0.7", "fd00::7"]


def test_no_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_ADDRESS", " ,")
    with pytest.raises(ArgumentError, match="BRAIDAX_ADDRESS is empty; expected addresses of this host"):
        host_addresses()


def test_addresses_that_are_found_can_be_reached_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRAIDAX_ADDRESS", raising=False)
    found = [ipaddress.ip_address(address) for address in host_addresses()]
    assert found
    versions = [address.version for address in found]
    assert versions == sorted(versions), "IPv4 comes first"
    if len(found) > 1:
        assert not any(address.is_loopback for address in found)
    assert not any(address.version == 6 and address.is_link_local for address in found)


def test_a_host_is_the_same_to_all_its_processes() -> None:
    asked = [sys.executable, "-c", "from braidax.connections.hosts import host_id; print(host_id())"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.strip() == host_id()
