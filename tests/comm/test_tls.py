"""TLS between ranks: what travels is the same, and who has none, or another authority, is refused."""

import ssl
from pathlib import Path

import pytest
import trustme

from braidax.comm import Tls, Tuning
from braidax.errors import HandshakeError
from tests.support.comm.exercise import exercise
from tests.support.comm.ranks import outcomes, results


def contexts(folder: Path) -> Tls:
    """Returns TLS of an authority of its own."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    return Tls(server, ssl.create_default_context(cafile=folder / "authority.pem"))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_operation(size: int, tmp_path: Path) -> None:
    tls = contexts(tmp_path)
    assert results(size, exercise, transport="tcp", tunings=[Tuning(tls=tls)] * size) == ["exercised"] * size


def test_another_authority_is_refused(tmp_path: Path) -> None:
    tunings = [Tuning(tls=contexts(tmp_path)) for _ in range(2)]
    found = outcomes(2, lambda comm: None, transport="tcp", tunings=tunings, timeout_seconds=5)
    assert any(isinstance(error, HandshakeError) and "cannot agree on TLS" in str(error) for error in found)
    assert all(isinstance(error, Exception) for error in found)


@pytest.mark.parametrize("encrypted", [0, 1])
def test_one_without_tls_is_refused(encrypted: int, tmp_path: Path) -> None:
    tunings = [Tuning(tls=contexts(tmp_path)) if rank == encrypted else Tuning() for rank in range(2)]
    found = outcomes(2, lambda comm: None, transport="tcp", tunings=tunings, timeout_seconds=5)
    assert any(isinstance(error, HandshakeError) and "TLS" in str(error) for error in found)
    assert all(isinstance(error, Exception) for error in found)
