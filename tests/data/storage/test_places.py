"""Where data lies: files, folders, patterns, lists and URLs."""

from pathlib import Path

import numpy as np
import pytest

from braidax.data.storage import LocalFiles, Ranges, Remote, list_files, open_files
from braidax.errors import ArgumentError, FormatError
from tests.support.data.storage.faulty_server import Reply, serving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", ".hidden", "deeper/c.txt", "deeper/.d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("a.txt", ["a.txt"]),
        ("", ["a.txt", "b.txt"]),
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "deeper/c.txt"]),
        ("[!a]*", ["b.txt"]),
    ],
)
def test_local_files_are_listed_by_name_without_hidden_ones(folder: Path, where: str, names: list[str]) -> None:
    assert list_files(str(folder / where)) == [str(folder / name) for name in names]


def test_a_list_keeps_its_order_and_may_hold_paths(folder: Path) -> None:
    names = [folder / "b.txt", str(folder / "a.txt")]
    assert list_files(names) == [str(name) for name in names]
    files = open_files(names)
    assert isinstance(files, LocalFiles)
    assert list(files.names) == [str(name) for name in names]
    one = np.array([0])
    assert bytes(files.read(Ranges(one, one, one + 5))[0]) == b"b.txt"


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(folder: Path) -> None:
    (folder / "part[0].txt").write_text("x")
    assert list_files(folder / "part[0].txt") == [str(folder / "part[0].txt")]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("nothing", "nothing: does not exist; check the path"),
        ("empty", "empty: is a folder without files"),
        ("*.none", r"\*.none: no file fits this pattern"),
    ],
)
def test_what_is_missing_is_named(folder: Path, where: str, words: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(FormatError, match=words):
        list_files(folder / where)


def test_a_list_is_of_one_kind_and_not_empty() -> None:
    with pytest.raises(ArgumentError, match=r"where=\[\] names no file"):
        open_files([])
    with pytest.raises(ArgumentError, match=r"URLs, such as http://x/a, and local files, such as b; open each kind"):
        open_files(["http://x/a", "b"])


def test_http_servers_are_not_listed() -> None:
    with serving({"train/a": b"1"}) as server:
        assert list_files(f"{server.url}/train/a") == [f"{server.url}/train/a"]
        for where in ("train/", "train/*"):
            with pytest.raises(FormatError, match=r"train/: an HTTP server cannot be asked.*pass a list of their URLs"):
                list_files(f"{server.url}/{where}")
        with pytest.raises(FormatError, match=r"train: there is no such object \(404\)"):
            list_files(f"{server.url}/train")


def test_a_signature_in_a_url_is_sent_along(tmp_path: Path) -> None:
    with serving({"a b": b"12345"}) as server:
        url = f"{server.url}/a%20b?X-Signature=a%2Fb&X-Expires=10"
        files = open_files(url, remote=Remote(cache_dir=tmp_path))
        one = np.array([0])
        assert bytes(files.read(Ranges(one, one + 1, one + 3))[0]) == b"234"
        assert {request.query for request in server.requests} == {"X-Signature=a%2Fb&X-Expires=10"}
        assert list(files.names) == [f"{server.url}/a%20b"]
        uncached = open_files(url, remote=Remote(cache_bytes=0))
        server.answer = lambda request: Reply(status=403)
        with pytest.raises(FormatError, match=r"a%20b: the server answered 403(?!.*X-Signature)"):
            uncached.read(Ranges(one, one, one + 1))
        assert not any(b"Signature" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_server_without_ranges_is_named() -> None:
    with serving({"a": b"12345"}) as server:
        server.answer = lambda request: Reply(ignore_range=True)
        with pytest.raises(FormatError, match=r"a: the server does not support Range requests.*copy it to a disk"):
            open_files(f"{server.url}/a")


def test_a_scheme_that_is_not_known_is_named() -> None:
    with pytest.raises(
        FormatError, match=r"ftp://x/y: cannot be read from ftp://; expected one of s3://, gs://, az://, hf"
    ):
        list_files("ftp://x/y")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_bytes": -1}, "cache_bytes=-1 is not 0 or more"),
        ({"cache_bytes": 1000}, r"cache_bytes=1,000 is less than 67,108,864.*cache_bytes=0 for none"),
        ({"block_bytes": 5000}, "block_bytes=5000 is no multiple of 4096"),
        ({"timeout_seconds": 0.0}, "timeout_seconds=0.0 is not above 0"),
        ({"hedge_seconds": float("nan")}, "hedge_seconds=nan is not 0 or more"),
        ({"retries": -2}, "retries=-2 is not 0 or more"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Remote(**options)


def test_what_the_client_does_not_know_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"s3://bucket: obstore's S3Store cannot be made of client=.*colour"):
        open_files("s3://bucket/x", remote=Remote(client={"colour": "red"}))
