"""Once is once for all processes of a machine: one makes a derived file, the others wait, and a killed one leaves
nothing."""

import contextlib
import fcntl
import gzip
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

import braidax.data.storage.locks as locks
from braidax.data.storage.derived import Derived
from braidax.data.storage.locks import NoPlace
from braidax.data.storage.progress import Progress
from braidax.errors import FormatError, WaitTimeout
from tests.support.data.storage.nursery import Nursery

HEAD = (
    "import os, sys, time; from pathlib import Path\n"
    "from braidax.data.storage.derived import Derived\n"
    "from braidax.data.storage.progress import Progress\n"
    'def say(text): sys.stdout.write(f"{text}\\n"); sys.stdout.flush()\n'  # in one piece: threads say it
)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


MAKING = """
def write(file):
    file.write(b"half")
    file.flush()
    say("making")
    sys.stdin.readline()
    file.write(b" and half")
    return {"by": os.getpid()}
derived = Derived(Path(os.environ["TARGET"]), {"kind": "x"})
with Progress("making", "x", 13) as work:
    {method}
"""
NUMBERS = MAKING.replace(
    "{method}", "kept = derived.numbers(write, work); say(f\"{bytes(kept.data)} {kept.facts['by']}\")"
)
CONTENTS = MAKING.replace("{method}", "derived.contents(write, work); say(f'{derived.path.read_bytes()} 0')")


def made(by: int) -> Any:
    def write(file: IO[bytes]) -> Mapping[str, Any]:
        file.write(b"half and half")
        return {"by": by}

    return write


def refuse(file: IO[bytes]) -> Mapping[str, Any]:
    raise AssertionError("it is made again")


@pytest.mark.parametrize("code", [NUMBERS, CONTENTS], ids=["numbers", "contents"])
def test_who_comes_while_another_makes_it_waits_and_finds_it(nursery: Nursery, tmp_path: Path, code: str) -> None:
    target = tmp_path / "folder" / "x"
    with nursery.process(HEAD + code, TARGET=str(target)) as first:
        assert first.line() == "making"
        said = json.loads(target.with_name("x.lock").read_bytes())
        assert said["pid"] == first.pid
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(use(target, code)))
        thread.start()
        with nursery.process(HEAD + code, TARGET=str(target)) as second:
            first.put()
            assert second.line() == first.line()  # it has never said that it is making it
        thread.join(30)
        assert found == [b"half and half"]
    names = sorted(path.name for path in target.parent.iterdir())
    assert names == (["x"] if code is NUMBERS else ["x", "x.made"])


def use(target: Path, code: str) -> bytes:
    derived = Derived(target, {"kind": "x"})
    with Progress("making", "x", 13) as work:
        if code is NUMBERS:
            return bytes(derived.numbers(refuse, work).data)
        derived.contents(refuse, work)
        return target.read_bytes()


@pytest.mark.parametrize("code", [NUMBERS, CONTENTS], ids=["numbers", "contents"])
def test_a_process_that_is_killed_leaves_no_lock_and_the_next_removes_its_part(
    nursery: Nursery, tmp_path: Path, code: str
) -> None:
    target = tmp_path / "x"
    others = dict.fromkeys(("x.12345678.part", "x.part", "y.abcdefgh.part"), b"mine")
    for name, contents in others.items():
        (tmp_path / name).write_bytes(contents)
    with nursery.process(HEAD + code, TARGET=str(target)) as first:
        assert first.line() == "making"
        first.kill()
    parts = {path.name for path in tmp_path.glob("*.part")} - set(others)
    assert parts  # which nobody could remove
    with nursery.process(HEAD + code, TARGET=str(target)) as second:
        assert second.line() == "making"
        assert not {path.name for path in tmp_path.glob("*.part")} & parts
        second.put()
        assert second.line().startswith("b'half and half'")
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix in (".part", ".lock")}
    assert left == others


def test_a_waiting_process_takes_over_at_once_when_the_maker_is_killed(nursery: Nursery, tmp_path: Path) -> None:
    target = tmp_path / "x"
    with nursery.process(HEAD + NUMBERS, TARGET=str(target)) as first:
        assert first.line() == "making"
        with nursery.process(HEAD + NUMBERS, TARGET=str(target)) as second:
            first.kill()
            assert second.line() == "making"
            second.put()
            assert second.line() == f"b'half and half' {second.pid}"


def test_eight_processes_make_each_of_several_files_once(nursery: Nursery, tmp_path: Path) -> None:
    code = """
import gzip
from braidax.data.storage import LocalFiles
from braidax.data.storage import inflate
real = inflate._read
def count(read, name, compression, num_bytes):
    if num_bytes == 6:
        say("reads " + name.rpartition("/")[2])
    return real(read, name, compression, num_bytes)
inflate._read = count
sys.stdin.readline()
files = inflate.inflated(LocalFiles(sorted(Path(os.environ["DATA"]).glob("*.gz"))))
say("found " + " ".join(Path(name).read_bytes().decode() for name in files.contents.names))
"""
    (tmp_path / "data").mkdir()
    for number in range(3):
        (tmp_path / "data" / f"{number}.gz").write_bytes(gzip.compress(f"contents{number}".encode()))
    with contextlib.ExitStack() as stack:
        environment = {"DATA": str(tmp_path / "data"), "BRAIDAX_CACHE": str(tmp_path / "cache")}
        ranks = [stack.enter_context(nursery.process(HEAD + code, **environment)) for _ in range(8)]
        for rank in ranks:
            rank.put()
        said = [text for rank in ranks for text in iter(rank.line, "")]
    assert sorted(text for text in said if text.startswith("reads")) == [f"reads {number}.gz" for number in range(3)]
    assert said.count("found contents0 contents1 contents2") == 8


def test_a_maker_without_progress_is_named(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_WAIT_SECONDS", 0.3)
    with nursery.process(HEAD + NUMBERS, TARGET=str(tmp_path / "x")) as first:
        assert first.line() == "making"
        with (
            Progress("making", "x", 13) as work,
            pytest.raises(WaitTimeout, match=rf"x: process {first.pid} on .* without progress for .* x\.lock; end it"),
        ):
            Derived(tmp_path / "x", {"kind": "x"}).numbers(refuse, work)


def test_progress_of_the_maker_is_shown_and_keeps_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "_WAIT_SECONDS", 0.5)
    target, begun = tmp_path / "x", time.monotonic()
    descriptor = os.open(target.with_name("x.lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    stop, moved = threading.Event(), threading.Event()

    def make() -> None:
        for done in range(1, 100):
            said = json.dumps({"braidax": "lock 1", "pid": 7, "host": "h", "parts": [], "done": done}).encode()
            os.pwrite(descriptor, said.ljust(1024), 0)
            if time.monotonic() > begun + 2.0:
                break
            stop.wait(0.1)
        moved.set()
        os.close(descriptor)

    maker = threading.Thread(target=make)
    maker.start()
    with Progress("making", "x", 100) as work:
        kept = Derived(target, {"kind": "x"}).numbers(made(1), work)
    assert moved.is_set()
    assert bytes(kept.data) == b"half and half"
    maker.join(10)
    assert "making x" in capsys.readouterr().err  # how far the other one was


@pytest.mark.parametrize("kind", ["text", "symlink", "folder"])
def test_a_strange_lock_is_left_alone(tmp_path: Path, kind: str) -> None:
    lock, work_of_years = tmp_path / "x.lock", tmp_path / "thesis.tex"
    work_of_years.write_bytes(b"ten years")
    if kind == "text":
        lock.write_bytes(b"the only key")
    elif kind == "symlink":
        lock.symlink_to(work_of_years)
    else:
        lock.mkdir()
    with Progress("making", "x", 13) as work, pytest.raises(NoPlace):
        Derived(tmp_path / "x", {"kind": "x"}).numbers(made(1), work)
    assert work_of_years.read_bytes() == b"ten years"
    assert kind != "text" or lock.read_bytes() == b"the only key"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex", "x.lock"]


@pytest.mark.parametrize("kind", ["text", "symlink"])
def test_what_lies_in_the_place_of_a_derived_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    target, work_of_years = tmp_path / "x", tmp_path / "thesis.tex"
    work_of_years.write_bytes(b"ten years")
    if kind == "text":
        target.write_bytes(b"ten years")
    else:
        target.symlink_to(work_of_years)
    derived = Derived(target, {"kind": "x"})
    with Progress("making", "x", 13) as work:
        with pytest.raises(NoPlace, match="x was not written by Braidax"):
            derived.numbers(made(1), work)
        with pytest.raises(NoPlace, match="x was not written by Braidax"):
            derived.contents(made(1), work)
        target.unlink()
        target.with_name("x.made").write_bytes(b"ten years")
        with pytest.raises(NoPlace, match=r"x\.made was not written by Braidax"):
            derived.contents(made(1), work)
    assert work_of_years.read_bytes() == target.with_name("x.made").read_bytes() == b"ten years"


def test_where_there_are_no_locks_each_makes_it_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with Progress("making", "x", 13) as work:
        kept = Derived(tmp_path / "x", {"kind": "x"}).numbers(made(1), work)
    assert bytes(kept.data) == b"half and half"
    assert "its file system has no locks, so each process makes it for itself" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]


def test_a_changed_byte_is_found_where_it_is_read(tmp_path: Path) -> None:
    def write(file: IO[bytes]) -> Mapping[str, Any]:
        file.write(bytes(10_000))
        return {}

    derived = Derived(tmp_path / "x", {"kind": "x"})
    with Progress("making", "x", 1) as work:
        derived.numbers(write, work)
    data = bytearray((tmp_path / "x").read_bytes())
    data[5000] ^= 1
    (tmp_path / "x").write_bytes(data)
    kept = derived.load()
    assert kept is not None
    kept.check(np.array([0, 9000]))
    with pytest.raises(FormatError, match=r"x: the 4,096 bytes from byte 4,096 on are not those .*; delete it"):
        kept.check(np.array([9000, 4097]))
    with pytest.raises(FormatError, match=r"x: the 4,096 bytes"):
        kept.check()
