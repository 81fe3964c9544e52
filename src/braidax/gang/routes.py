"""Which of this host's addresses another host reaches it by."""

import socket

from braidax.errors import GangError


def address_towards(host: str) -> str:
    """Returns the address of this host on the way to another one, by name or address; nothing is sent.

    **Raises:** `GangError` when there is no way.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GangError(
            f"host {host!r} cannot be reached from {socket.gethostname()!r} ({error}); is the name right, and the "
            "network up? Otherwise say by which address the hosts reach this one: --address"
        ) from error
