"""Processes of one benchmark that join one `jax.distributed`."""

import io
import socket
from collections.abc import Generator
from contextlib import contextmanager

from benchmarks.harness.running import say
from braidax.gang import LocalGang

_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}


@contextmanager
def processes(number: int) -> Generator[tuple[LocalGang, int]]:
    """Yields a gang on CPUs and a free port for JAX's coordination service, which they are to join by.

    What the processes print is shown only if something goes wrong.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    log = io.StringIO()
    try:
        with LocalGang(number, environment=_ENVIRONMENT, log=log) as gang:
            yield gang, port
    except KeyboardInterrupt:
        raise
    except BaseException:
        say(log.getvalue())
        raise
