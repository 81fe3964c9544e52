"""The store of derived files: within its limit, by what was made here alone, and never by what is in use."""

import gc
import gzip
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest

import braidax as bx
from braidax.data.storage.derived import Derived
from braidax.data.storage.progress import Progress
from braidax.data.storage.room import Room, limit_bytes, make_room
from braidax.errors import ArgumentError
from tests.support.data.formats.reading import read

BYTES = 40_000
CODE = """
import sys
from pathlib import Path
from braidax.data.storage.room import Room
room = Room("x")
room.claim([Path(sys.argv[1])])
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "derived"


def write(file: IO[bytes]) -> Mapping[str, Any]:
    file.write(bytes(BYTES))
    return {}


def filled(store: Path) -> dict[str, Path]:
    """Makes three numbers and three contents, the first the longest unused."""
    found: dict[str, Path] = {}
    with Progress("making", "x", 1) as work:
        for number in range(3):
            for kind in ("numbers", "contents"):
                derived = Derived(store / kind / f"{number}", {"kind": kind})
                getattr(derived, kind)(write, work)
                found[f"{kind} {number}"] = derived.path
                last = derived.path if kind == "numbers" else derived.path.with_name(f"{number}.made")
                os.utime(last, (number + 1, number + 1))
    return found


def there(found: Mapping[str, Path]) -> list[str]:
    return sorted(name for name, path in found.items() if path.exists())


def test_what_was_unused_for_longest_makes_room(store: Path) -> None:
    found = filled(store)
    make_room(store, 10 * BYTES)
    assert there(found) == sorted(found)
    make_room(store, 3 * BYTES)
    assert there(found) == ["contents 2", "numbers 2"]
    assert sorted(path.name for path in (store / "contents").iterdir()) == ["2", "2.made"]


def test_strangers_files_in_the_store_stay(store: Path, tmp_path: Path) -> None:
    found = filled(store)
    outside = tmp_path / "outside"
    outside.write_bytes(found["numbers 0"].read_bytes())
    strangers = {
        store / "thesis.tex": b"ten years of work" * 9999,
        store / "contents" / "3": bytes(BYTES),
        store / "contents" / "3.made": b"not ours",
        store / "numbers" / "3": bytes(BYTES),
        store / "numbers" / "x.12345678.part": bytes(BYTES),
        store / "in-use" / "data-mine.json": b"mine\n",
    }
    for path, contents in strangers.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(contents)
    for number in range(2):
        found[f"contents {number}"].write_bytes(b"changed by its user")  # no footer proves that it was made here
    (store / "numbers" / "link").symlink_to(outside)
    (store / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "0").write_bytes(outside.read_bytes())
    make_room(store, 1)
    assert there(found) == ["contents 0", "contents 1"]
    assert {path: path.read_bytes() for path in strangers} == strangers
    assert outside.exists()
    assert (store / "numbers" / "link").is_symlink()
    assert (tmp_path / "elsewhere" / "0").exists()


def test_what_a_process_uses_stays_until_it_ends(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = filled(store)
    room = Room("numbers")
    room.claim([found["numbers 0"], store / "not there yet"])
    command = [sys.executable, "-c", CODE, str(found["contents 0"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        with caplog.at_level(logging.WARNING, "braidax"):
            make_room(store, 1)
        assert there(found) == ["contents 0", "numbers 0"]
        assert "the derived files that are in use take" in caplog.text
        assert "BRAIDAX_CACHE_BYTES=1" in caplog.text
        other.kill()
    make_room(store, 1)
    assert there(found) == ["numbers 0"]
    assert len(list((store / "in-use").iterdir())) == 1  # that of the killed process is gone, too
    del room
    gc.collect()
    make_room(store, 1)
    assert there(found) == []
    assert list((store / "in-use").iterdir()) == []


def test_an_open_data_set_uses_what_was_made_for_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE_BYTES", "1")
    paths = [tmp_path / f"{number}.jsonl.gz" for number in range(2)]
    for number, path in enumerate(paths):
        path.write_bytes(gzip.compress(b'{"x": %d}\n' % number))
    first = bx.open(paths[0])
    second = bx.open(paths[1])
    assert [read(source, [0])["x"].tolist() for source in (first, second)] == [[0], [1]]
    assert len(list(store.rglob("*.jsonl"))) == 2
    del first
    gc.collect()
    make_room(store, 1)
    assert len(list(store.rglob("*.jsonl"))) == 1
    assert read(second, [0])["x"].tolist() == [1]


def test_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRAIDAX_CACHE_BYTES", raising=False)
    assert limit_bytes() == 256 << 30
    monkeypatch.setenv("BRAIDAX_CACHE_BYTES", "1000")
    assert limit_bytes() == 1000
    monkeypatch.setenv("BRAIDAX_CACHE_BYTES", "10 GB")
    with pytest.raises(ArgumentError, match="BRAIDAX_CACHE_BYTES='10 GB' is not a number of bytes; expected one such"):
        limit_bytes()
