"""Files that say on which hosts, and on which of their devices, to run."""

from dataclasses import dataclass
from pathlib import Path

from braidax.errors import ArgumentError

_ALL, _SERVER = "all", "server"


@dataclass(frozen=True)
class Host:
    """A host, and what runs there.

    **Fields:** `name`. `devices`: those that have a process each. `num_servers`: how many processes have tables or
    variables of the program's steps. Without either it has one process that sees all devices, and so it has where
    `sees_all` says it.
    """

    name: str
    devices: tuple[int, ...] = ()
    num_servers: int = 0
    sees_all: bool = False

    @property
    def num_processes(self) -> int:
        """How many processes of the program it runs."""
        return len(self.devices) or int(self.sees_all or not self.num_servers)


def read_hosts(path: str | Path) -> list[Host]:
    """Reads a file with a line a host: `host`, or behind a colon what runs there; `#` begins a comment.

    That is numbers of devices, each of which has a process (`host: 0,1,2`), or `all`, for one process that has all of
    them, as a `host` alone has; and `server` for each process that has tables (`host: 0,1,server`, `host: server`).

    **Raises:** `ArgumentError` naming the file and the line.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path}: cannot be read ({error}); expected a text file with a line a host") from error
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        host = _host(words, f"{path}:{number}")
        if host.name in found:
            raise ArgumentError(
                f"{path}:{number}: the host {host.name!r} is there twice; put all its devices in one line"
            )
        found[host.name] = host
    if not found:
        raise ArgumentError(f"{path}: names no host; expected a line a host, such as node1 or node1: 0,1")
    if not any(host.num_processes for host in found.values()):
        raise ArgumentError(f"{path}: names servers alone; expected a host for the program, such as node1, too")
    return list(found.values())


def _host(words: str, where: str) -> Host:
    name, colon, listed = words.partition(":")
    name = name.strip()
    texts = [text.strip() for text in listed.split(",")] if colon else []
    numbers = [text for text in texts if text not in (_ALL, _SERVER)]
    is_name = name and not any(letter.isspace() for letter in name) and not name.startswith("-")
    if not is_name or not all(text.isascii() and text.isdecimal() for text in numbers):
        raise ArgumentError(
            f"{where}: {words!r} is no host; expected such as node1, or node1: 0,1 with device numbers, or "
            f"node1: 0,1,server"
        )
    devices = tuple(int(text) for text in numbers)
    if len(set(devices)) < len(devices):
        raise ArgumentError(f"{where}: {words!r} names a device twice; expected each once")
    if texts.count(_ALL) > (not devices):
        raise ArgumentError(f"{where}: {words!r}: expected {_ALL} once, for one process, or device numbers")
    return Host(name, devices, texts.count(_SERVER), _ALL in texts)
