"""Files of hosts: the seed's resource specification."""

from pathlib import Path

import pytest

from braidax.errors import ArgumentError
from braidax.gang.hosts import Host, read_hosts

TEXT = """
# machines of the lab
node1
node2: 0,1   # two of its GPUs

me@10.0.0.3 : 3
node4: 1, server,0, server
node5: server
node6: all,server
"""


def test_hosts_and_their_devices_are_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(TEXT)
    hosts = read_hosts(path)
    assert hosts == [
        Host("node1"),
        Host("node2", (0, 1)),
        Host("me@10.0.0.3", (3,)),
        Host("node4", (1, 0), 2),
        Host("node5", (), 1),
        Host("node6", (), 1, sees_all=True),
    ]
    assert [host.num_processes for host in hosts] == [1, 2, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\na: 1\n", "hosts:3: the host 'a' is there twice; put all its devices in one line"),
        ("a: 0,0", "hosts:1: 'a: 0,0' names a device twice"),
        ("a: x", "hosts:1: 'a: x' is no host; expected such as node1, or node1: 0,1 with device numbers"),
        ("\na:", "hosts:2: 'a:' is no host"),
        (": 1", "hosts:1: ': 1' is no host"),
        ("two words", "hosts:1: 'two words' is no host"),
        ("-oProxyCommand=x", "hosts:1: '-oProxyCommand=x' is no host"),
        ("a: all,1", "hosts:1: 'a: all,1': expected all once, for one process, or device numbers"),
        ("a: all,all", "hosts:1: 'a: all,all': expected all once"),
        ("a: server", "hosts: names servers alone; expected a host for the program, such as node1, too"),
        ("# nothing\n", "hosts: names no host"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_hosts(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nowhere: cannot be read"):
        read_hosts(tmp_path / "nowhere")
