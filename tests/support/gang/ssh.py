"""A real sshd on loopback, for the tests of launching over ssh: two names of hosts that lead to this machine."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

CLIENT = """
Host a b
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
"""
SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
"""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Runs a server with keys of its own, and gives the command that reaches the hosts `a` and `b`."""
    for name in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=30)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host_key.pub').read_text()}")
    (folder / "client").write_text(CLIENT.format(port=port, folder=folder))
    (folder / "server").write_text(SERVER.format(port=port, folder=folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd's unprivileged half is locked in
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    assert sshd, "these tests need OpenSSH's server: apt-get install openssh-server"
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([sshd, "-D", "-e", "-f", str(folder / "server")], stderr=log)
    try:
        _wait_for(port, server, folder / "log")
        yield f"ssh -F {folder / 'client'}"
    finally:
        server.terminate()
        server.wait(10)


def _wait_for(port: int, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
