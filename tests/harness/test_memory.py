"""A limit of memory: who takes more is ended, and the group is gone behind it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.memory import NoLimitError, memory_limit

_CHILD = (
    "import sys; sys.stdin.readline(); taken = bytearray(int(sys.argv[1])); taken[::4096] = b'1' * len(taken[::4096])"
)


@pytest.mark.parametrize(("num_bytes", "status"), [(1 << 20, 0), (200 << 20, -signal.SIGKILL)])
def test_a_process_is_held_to_it(num_bytes: int, status: int) -> None:
    try:
        with memory_limit(64 << 20) as group:
            command = [sys.executable, "-c", _CHILD, str(num_bytes)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as child:
                group.add(child.pid)
                child.communicate("\n")
                assert child.returncode == status
            assert 0 < group.peak_bytes <= 64 << 20
            folder = group._folder
    except NoLimitError as error:
        pytest.skip(str(error))
    assert not folder.exists()


def test_where_there_are_no_groups_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(path: Path, *_: object, **__: object) -> str:
        return "1:cpu:/\n0::/\n"

    monkeypatch.setattr(Path, "read_text", text)
    with pytest.raises(NoLimitError, match="no group of this process hands on limits of memory"), memory_limit(1 << 30):
        pass
