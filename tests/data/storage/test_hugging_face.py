"""Repositories of the Hugging Face Hub: a server on loopback that answers as it does."""

import json
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import braidax.data as data
from braidax.data.storage import Ranges, Remote, list_files, open_files
from braidax.data.storage.hugging_face import repository_address
from braidax.errors import FormatError, MissingExtra
from tests.support.data.formats.reading import read
from tests.support.data.storage.faulty_server import RIGHT, Reply, Request, Server, serving

COMMIT, OLDER = "a" * 40, "b" * 40
FILES = {
    "README.md": b"text",
    "train/1 a.jsonl": b'{"n": 0}\n{"n": 1}\n',
    "train/2.jsonl": b'{"n": 2}\n',
    "train/.hidden": b"x",
    "train/deeper/3.jsonl": b'{"n": 3}\n',
}
UNCACHED = Remote(cache_bytes=0)
REPOSITORY = "hf://datasets/who/what"
NOUGHT = np.array([0])


def listed(folder: str, *, is_deep: bool) -> list[dict[str, Any]]:
    """What the server says of a folder."""
    found: dict[str, dict[str, Any]] = {}
    for path, content in FILES.items():
        if not path.startswith(folder):
            continue
        parts = path[len(folder) :].split("/")
        for depth in range(1, len(parts)):
            name = folder + "/".join(parts[:depth])
            if is_deep or depth == 1:
                found[name] = {"type": "directory", "oid": "1", "path": name}
        if is_deep or len(parts) == 1:
            found[path] = {"type": "file", "oid": "2", "size": len(content), "path": path}
    return list(found.values())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A Hub whose large files lie on another server, as there."""
    of_commit = {f"datasets/who/what/resolve/{COMMIT}/{path}": content for path, content in FILES.items()}
    with serving({f"cdn/{path}": content for path, content in of_commit.items()}) as cdn, serving({}) as server:

        def answer(request: Request) -> Reply:
            if request.path.startswith(f"api/datasets/who/what/tree/{COMMIT}"):
                folder = request.path.removeprefix(f"api/datasets/who/what/tree/{COMMIT}").removeprefix("/")
                folder += "/" if folder else ""
                is_deep = "recursive=true" in request.query.lower()
                server.objects[request.path] = json.dumps(listed(folder, is_deep=is_deep)).encode()
            if request.path in of_commit:
                return Reply(location=f"{cdn.url}/cdn/{request.path}".replace(" ", "%20"))
            return RIGHT

        for revision, commit in {"main": COMMIT, "v1": COMMIT, "refs/convert/parquet": COMMIT, "old": OLDER}.items():
            about = json.dumps({"id": "who/what", "sha": commit}).encode()
            server.objects[f"api/datasets/who/what/revision/{revision}"] = about
        server.answer = answer
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr(server, "cdn", cdn, raising=False)
        yield server


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("/train/2.jsonl", ["train/2.jsonl"]),
        ("@v1/train/2.jsonl", ["train/2.jsonl"]),
        ("@refs/convert/parquet/README.md", ["README.md"]),
        ("/train", ["train/1 a.jsonl", "train/2.jsonl"]),
        ("/train/", ["train/1 a.jsonl", "train/2.jsonl"]),
        ("/train/*.jsonl", ["train/1 a.jsonl", "train/2.jsonl"]),
        ("/**/*.jsonl", ["train/1 a.jsonl", "train/2.jsonl", "train/deeper/3.jsonl"]),
        ("", ["README.md"]),
        ("/", ["README.md"]),
    ],
)
def test_files_are_found(hub: Server, where: str, names: list[str]) -> None:
    root, _ = repository_address(f"{REPOSITORY}{where}")
    assert list_files(f"{REPOSITORY}{where}", remote=UNCACHED) == [f"{root}/{name}" for name in names]


def test_files_are_read_where_they_lie(hub: Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path))
    source = data.open(f"{REPOSITORY}/train/", remote=UNCACHED)
    assert read(source, [2, 0, 1])["n"].tolist() == [2, 0, 1]
    files = open_files(f"{REPOSITORY}/train/2.jsonl", remote=Remote(cache_dir=tmp_path / "kept"))
    for again in (files, pickle.loads(pickle.dumps(files)), files):
        assert bytes(again.read(Ranges(NOUGHT, NOUGHT + 2, NOUGHT + 3))[0]) == b'n":'


def test_the_token_is_told_to_the_hub_alone(hub: Server) -> None:
    open_files(f"{REPOSITORY}/README.md", remote=UNCACHED).read(Ranges(NOUGHT, NOUGHT, NOUGHT + 4))
    assert {request.headers.get("authorization") for request in hub.requests} == {"Bearer hf_secret"}
    cdn: Any = vars(hub)["cdn"]
    assert cdn.requests
    assert not any("authorization" in request.headers for request in cdn.requests)


def test_files_that_do_not_fit_are_not_asked_for(hub: Server) -> None:
    files = open_files(f"{REPOSITORY}/train/*.jsonl", remote=UNCACHED)
    assert [name.rpartition("/")[2] for name in files.names] == ["1 a.jsonl", "2.jsonl"]
    assert list(files.sizes) == [len(FILES["train/1 a.jsonl"]), len(FILES["train/2.jsonl"])]
    asked = {request.path.rpartition("/")[2] for request in hub.requests if "/resolve/" in request.path}
    assert asked == {"1 a.jsonl", "2.jsonl"}


def test_all_is_read_from_one_commit(hub: Server) -> None:
    files = open_files(f"{REPOSITORY}/README.md", remote=UNCACHED)
    hub.objects["api/datasets/who/what/revision/main"] = json.dumps({"id": "who/what", "sha": OLDER}).encode()
    assert bytes(files.read(Ranges(NOUGHT, NOUGHT, NOUGHT + 4))[0]) == b"text"
    asked = [request.path for request in hub.requests if "/resolve/" in request.path]
    assert set(asked) == {f"datasets/who/what/resolve/{COMMIT}/README.md"}


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("hf://datasets/who/what/nothing", r"what/nothing: there is no such object \(404\)"),
        ("hf://datasets/who/what/nothing/", r"what/nothing/: there are no objects"),
        ("hf://datasets/who/what@none/a", r"what@none: cannot be found on the Hub \(\w+: .*\); check the name, the"),
        ("hf://datasets/who/else/a", r"who/else: cannot be found on the Hub .* set HF_TOKEN for what is not for every"),
        ("hf://who/what/*.bin", r"hf://who/what: cannot be found on the Hub"),
        ("hf://datasets/squad", r"hf://datasets/squad: names no repository; expected hf://datasets/USER/NAME/PATH"),
        ("hf://", r"hf://: names no repository"),
    ],
)
def test_what_is_missing_is_named(hub: Server, where: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        list_files(where, remote=UNCACHED)


@pytest.mark.parametrize(
    ("url", "root", "path"),
    [
        ("hf://datasets/a/b/c/d.csv", "hf://datasets/a/b", "c/d.csv"),
        ("hf://a/b@v1/c", "hf://a/b@v1", "c"),
        ("hf://models/a/b@x%2Fy/c", "hf://models/a/b@x%2Fy", "c"),
        ("hf://datasets/a/b@refs/pr/7/c", "hf://datasets/a/b@refs/pr/7", "c"),
        ("hf://spaces/a/b", "hf://spaces/a/b", ""),
    ],
)
def test_urls_name_a_repository_and_a_path(url: str, root: str, path: str) -> None:
    assert repository_address(url) == (root, path)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r'reading hf:// URLs needs .*"braidax\[hub\]"'):
        open_files(f"{REPOSITORY}/a")
