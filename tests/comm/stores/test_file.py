"""The file store: what lies in the folder, and what is said when the folder is no good."""

import fcntl
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from braidax.comm.stores import file
from braidax.comm.stores.file import FileStore
from braidax.errors import CommError, WaitTimeout
from tests.support.comm.stores.servers import in_thread


def test_the_folder_is_of_this_user_only_and_holds_no_drafts(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "new" / "store")
    folder = tmp_path / "new" / "store"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    store.set("a/b", b"x")
    store.set("a/b", b"y")
    store.add("a/b", 1)
    assert sorted(path.name[:6] + path.suffix for path in folder.iterdir()) == ["a%2Fb-.counter", "a%2Fb-.value"]


def test_readers_see_old_or_new_values_only(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    values = [bytes([number]) * (1 << 18) for number in range(50)]
    store.set("key", values[0])

    def write() -> None:
        for value in values:
            store.set("key", value)

    writing = in_thread(write)
    seen = [store.get("key", timeout_seconds=0) for _ in range(200)]
    writing.get()
    assert all(value in values for value in seen)


def test_a_write_that_fails_leaves_the_old_value_and_no_draft(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.set("key", b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CommError, match=r"the folder of the store cannot be used \(File too large\)"):
            store.set("key", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert store.get("key", timeout_seconds=0) == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_lies_in_the_folder_is_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = FileStore(tmp_path / "store")
        store.set("secret", b"s" * 32)
        store.add("joined", 1)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()] == [0o600, 0o600]


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o770])
def test_a_folder_that_others_may_enter_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "made before"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(
        CommError,
        match=rf"^file://.*/made%20before: the folder is open to others \(its mode is {mode:04o}\); expected .*: "
        r"name a folder that is not there yet, or take this one from the others \(chmod 700\)$",
    ):
        FileStore(folder)
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    FileStore(folder).set("key", b"value")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(
        CommError, match=rf"the folder belongs to user {user}, and this process runs as user {user + 1};"
    ):
        FileStore(tmp_path)


def test_a_link_that_is_changed_later_leads_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "theirs").mkdir(mode=0o777)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    store = FileStore(tmp_path / "link")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    store.set("key", b"value")
    assert store.address == (tmp_path / "link").as_uri()
    assert len(list((tmp_path / "mine").iterdir())) == 1
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_lock_that_is_never_given_up_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    assert store.add("n", 1) == 1
    (counter,) = tmp_path.iterdir()
    monkeypatch.setattr(file, "_LOCK_SECONDS", 0.3)
    with counter.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CommError, match=r"another process has held the lock of this counter for 0.3 s; is a rank"):
            store.add("n", 1)
        assert store.add("other", 1) == 1
    assert store.add("n", 1) == 2


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    assert store.add("n", 1) == 1
    (counter,) = tmp_path.iterdir()
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, counter]).returncode == -9
    assert store.add("n", 1) == 2


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CommError, match=r"^file://.*/file/store: the folder of the store cannot be used \(Not a dir"):
        FileStore(tmp_path / "file" / "store")
    store = FileStore(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")  # noqa: PTH106
    with pytest.raises(CommError, match="No such file or directory"):
        store.set("key", b"v")
    with pytest.raises(CommError, match="No such file or directory"):
        store.get("key", timeout_seconds=60)
    with pytest.raises(CommError, match="No such file or directory"):
        store.add("n", 1)


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileStore("store")
    monkeypatch.chdir("/")
    assert store.address == (tmp_path / "store").as_uri()
    with pytest.raises(WaitTimeout):
        store.get("key", timeout_seconds=0)
