"""No name that comes out of a data file, an index or a listing leads out of the folder of its data set."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import braidax as bx
from braidax.data.storage import Remote, list_files
from braidax.data.storage.names import inside
from braidax.errors import FormatError
from tests.support.bucket_server import serving_bucket
from tests.support.data.formats.mds import write_mds
from tests.support.data.formats.reading import read

WORK = b"ten years of work"


@pytest.mark.parametrize("folder", ["/data/set", "s3://bucket/set", "https://host/set/"])
def test_a_name_in_the_folder(folder: str) -> None:
    assert inside(folder, "a b.mds", told_by="index.json") == f"{folder.rstrip('/')}/a b.mds"
    assert inside(folder, "deeper/..a", told_by="index.json") == f"{folder.rstrip('/')}/deeper/..a"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        *(("/data/set", name) for name in ("/etc/passwd", "../other", "a/../../b", "..", ".", "", "a//b", "a\0b")),
        *(("/data/set", name) for name in (None, 7, ["a"])),
        *(("s3://bucket/set", name) for name in ("/key", "../key", "a/..")),
        *(("https://host/set", name) for name in ("%2e%2e/key", "a%2f..%2fb", "key?x=1", "key#x", "%2Fkey")),
    ],
)
def test_a_name_that_leads_out_of_it_is_refused(folder: str, name: object) -> None:
    with pytest.raises(FormatError, match=r"index\.json: names the file .*, which does not lie in .*set; expected"):
        inside(folder, name, told_by="index.json")


@pytest.mark.parametrize("codec", [None, "gzip"])
@pytest.mark.parametrize("part", ["raw_data", "zip_data"])
@pytest.mark.parametrize("how", ["absolute", "climbing"])
def test_an_mds_index_neither_reads_nor_writes_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str | None, part: str, how: str
) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    folder = write_mds(tmp_path / "set", {"x": "int"}, [{"x": bytes(8)}] * 3, codec=codec)
    outside = tmp_path / "thesis.tex"
    outside.write_bytes(WORK)
    index = json.loads((folder / "index.json").read_text())
    shard = index["shards"][0]
    if shard[part] is None:
        shard[part] = dict(shard["raw_data"])
    shard[part]["basename"] = str(outside) if how == "absolute" else "../" * 40 + str(outside)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"index\.json: names the file .*thesis\.tex', which does not lie in"):
        bx.open(folder)
    assert outside.read_bytes() == WORK
    assert not (tmp_path / "cache").exists()


def saved(tmp_path: Path) -> Path:
    data = datasets.Dataset.from_dict({"x": np.arange(5)})
    datasets.DatasetDict({"train": data, "other": data.select([3, 1])}).save_to_disk(tmp_path / "set")
    data.save_to_disk(tmp_path / "elsewhere")
    return tmp_path / "set"


def _escaping_file(folder: Path, state: dict[str, Any]) -> None:
    state["_data_files"][0]["filename"] = "../../elsewhere/data-00000-of-00001.arrow"


def _absolute_file(folder: Path, state: dict[str, Any]) -> None:
    state["_data_files"][0]["filename"] = str(folder.parent / "elsewhere" / "data-00000-of-00001.arrow")


def _escaping_indices(folder: Path, state: dict[str, Any]) -> None:
    state["_indices_files"] = [{"filename": "../../elsewhere/data-00000-of-00001.arrow"}]


@pytest.mark.parametrize("change", [_escaping_file, _absolute_file, _escaping_indices])
def test_the_state_of_a_hugging_face_folder(tmp_path: Path, change: Callable[[Path, dict[str, Any]], None]) -> None:
    folder = saved(tmp_path)
    path = folder / "train" / "state.json"
    state = json.loads(path.read_text())
    change(folder, state)
    path.write_text(json.dumps(state))
    with pytest.raises(FormatError, match=r"state\.json: names the file .*arrow', which does not lie in"):
        bx.open(folder)


@pytest.mark.parametrize("name", ["../elsewhere", ".", ""])
def test_the_splits_of_a_hugging_face_folder(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(FormatError, match=r"dataset_dict\.json: names the file .*, which does not lie in"):
        bx.open(folder)


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_listing_with_a_name_that_climbs(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with serving_bucket(kind) as running:
        for name, value in running.environ.items():
            monkeypatch.setenv(name, value)
        running.store.put("train/a.txt", b"x")
        running.store.put("train/%2e%2e/other.txt", b"y")  # as the server lists it: train/../other.txt
        for where in ("/train/", "/train/**/*.txt"):
            with pytest.raises(FormatError, match=r"an object there has a name that leads out of its folder .*\.\."):
                list_files(f"{running.bucket}{where}", remote=Remote(retries=0))


def test_a_folder_of_links_is_read_and_never_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    real, folder = tmp_path / "real", tmp_path / "set"
    real.mkdir()
    folder.mkdir()
    (real / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    (real / "b.jsonl.gz").write_bytes(gzip.compress(b'{"x": 3}\n'))
    (folder / "a.jsonl").symlink_to(real / "a.jsonl")
    (tmp_path / "b.jsonl.gz").symlink_to(real / "b.jsonl.gz")
    work = tmp_path / "thesis.tex"
    work.write_bytes(WORK)
    before = {path: path.read_bytes() for path in (*real.iterdir(), work)}
    for name in (".a.jsonl.jsonl.index", ".a.jsonl.jsonl.index.lock"):
        (folder / name).symlink_to(work)
    assert read(bx.open(folder), [1, 0])["x"].tolist() == [2, 1]
    assert read(bx.open(tmp_path / "b.jsonl.gz"), [0])["x"].tolist() == [3]
    assert {path: path.read_bytes() for path in (*real.iterdir(), work)} == before
    assert sorted(path.name for path in real.iterdir()) == ["a.jsonl", "b.jsonl.gz"]
