"""What the stores of the tests need: servers on loopback, and other processes."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxlib import _jax

from braidax.connections.coordination import Coordination
from tests.support.tree import ROOT

SECRET = secrets.token_bytes(32)
REDIS_PASSWORD = secrets.token_hex(16)
START_SECONDS = 60.0


def free_port() -> int:
    """Returns a port of loopback that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Runs a Redis server with `REDIS_PASSWORD`, which keeps nothing; gives its port."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    for _ in range(5):  # somebody else may take the port first
        port = free_port()
        options = f"--port {port} --bind 127.0.0.1 --appendonly no --dir {folder} --requirepass {REDIS_PASSWORD}"
        process = subprocess.Popen([program, *options.split(), "--save", ""], stdout=subprocess.DEVNULL)
        try:
            if _listens(port, process):
                yield port
                return
        finally:
            process.kill()
            process.wait(30)
    pytest.fail("redis-server does not start")


def _listens(port: int, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
    return False


class Neighbor:
    """Another process that opens stores; see `tests.support.comm.stores.neighbor`."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "BRAIDAX_SECRET": SECRET.hex(),
            "BRAIDAX_REDIS_PASSWORD": REDIS_PASSWORD,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.comm.stores.neighbor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def tell(self, action: str, name: str, **given: Any) -> None:
        """Begins to do something there."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"action": action, "name": name, **given}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Returns what came of it."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, action: str, name: str, **given: Any) -> Any:
        """Does something there, and returns what came of it."""
        self.tell(action, name, **given)
        return self.hear()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait(30)
            self._process.stdout.close()


@contextlib.contextmanager
def coordination_service(neighbors: list[Neighbor], name: str) -> Iterator[Coordination]:
    """Runs JAX's coordination service, and gives it as this process sees it.

    The neighbors join, with a store of that name. This process uses the service's own objects, since
    `jax.distributed.initialize` would change all other tests.
    """
    address, size = f"127.0.0.1:{free_port()}", len(neighbors) + 1
    service = _jax.get_distributed_runtime_service(address, size)
    client = _jax.get_distributed_runtime_client(address, 0, use_compression=True)
    for rank, neighbor in enumerate(neighbors, 1):
        neighbor.tell("join", name, url=address, size=size, rank=rank)
    client.connect()
    assert [neighbor.hear() for neighbor in neighbors] == [None] * len(neighbors)
    try:
        yield Coordination(client, 0)
    finally:
        for neighbor in neighbors:
            neighbor.tell("leave", name)
        client.shutdown()
        for neighbor in neighbors:
            neighbor.hear()
        service.shutdown()


def in_thread(function: Any, *args: Any, **options: Any) -> "Result":
    """Calls a function in another thread."""
    return Result(function, args, options)


class Result:
    """What a function returns or raises in another thread."""

    def __init__(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._found: tuple[Any, BaseException | None] = (None, None)

        def call() -> None:
            try:
                self._found = (function(*args, **options), None)
            except BaseException as error:  # noqa: BLE001  (raised by get)
                self._found = (None, error)

        self._thread = threading.Thread(target=call)
        self._thread.start()

    def get(self) -> Any:
        """Waits for it; raises what was raised."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        value, error = self._found
        if error is not None:
            raise error
        return value
