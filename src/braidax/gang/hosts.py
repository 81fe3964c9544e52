"""Files that say on which hosts, and on which of their devices, to run."""

from dataclasses import dataclass
from pathlib import Path

from braidax.errors import ArgumentError


@dataclass(frozen=True)
class Host:
    """A host, and the devices of it that have a process each; without devices it has one process that sees all."""

    name: str
    devices: tuple[int, ...] = ()

    @property
    def num_processes(self) -> int:
        """How many processes it runs."""
        return len(self.devices) or 1


def read_hosts(path: str | Path) -> list[Host]:
    """Reads a file with a line a host: `host`, or `host: 0,1,2` with numbers of devices; `#` begins a comment.

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
    return list(found.values())


def _host(words: str, where: str) -> Host:
    name, colon, listed = words.partition(":")
    name = name.strip()
    texts = [text.strip() for text in listed.split(",")] if colon else []
    is_name = name and not any(letter.isspace() for letter in name) and not name.startswith("-")
    if not is_name or not all(text.isascii() and text.isdecimal() for text in texts):
        raise ArgumentError(f"{where}: {words!r} is no host; expected such as node1, or node1: 0,1 with device numbers")
    devices = tuple(int(text) for text in texts)
    if len(set(devices)) < len(devices):
        raise ArgumentError(f"{where}: {words!r} names a device twice; expected each once")
    return Host(name, devices)
