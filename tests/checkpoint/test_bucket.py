"""Checkpoints go to an object store whole or not at all, and come back bit for bit."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braidax as bx
from braidax.checkpoint import Bucket, Folder, restore
from braidax.checkpoint.places import object_store
from braidax.errors import ArgumentError, CheckpointError, WaitTimeout
from tests.support.bucket_server import BucketServer, Request, serving_bucket
from tests.support.checkpoint.saving import bits, names
from tests.support.gang.forks import LOAD_AND_SAVE, fork_children

URL = "s3://bucket/runs/a"
LIMIT = 60.0
# What differs between them is tested by day in test_object_store.py.
EITHER = pytest.mark.parametrize("server", ["s3", pytest.param("gs", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[BucketServer]:
    with serving_bucket(getattr(request, "param", "s3")) as running:
        yield running


def tree(number: int, num_rows: int = 8) -> dict[str, Any]:
    return {"w": jnp.arange(num_rows * 4.0).reshape(-1, 4) * number, "key": jax.random.key(number), "epoch": number}


def archive(server: BucketServer, folder: Path, every: int = 2, keep: int = 3) -> bx.Checkpointer:
    """Each checkpoint goes to the folder, and some to the bucket; the first one of a run always does."""
    bucket = Bucket(f"{server.bucket}/runs/a", every=every, keep=keep, client=server.client)
    return bx.Checkpointer([Folder(folder, keep=2), bucket], bx.Every(1), timeout_seconds=LIMIT)


def objects(server: BucketServer) -> list[str]:
    """Returns the objects by name, tokens left out."""
    keys = [meta["path"] for chunk in server.store.list() for meta in chunk]
    return sorted(".".join([key.partition(".")[0], key.rpartition("/")[2]]) for key in keys)


def same(one: Any, other: Any) -> bool:
    return [bits(leaf) for leaf in jax.tree.leaves(one)] == [bits(leaf) for leaf in jax.tree.leaves(other)]


@EITHER
def test_what_is_due_is_uploaded_and_comes_back_to_an_empty_disk(server: BucketServer, tmp_path: Path) -> None:
    with archive(server, tmp_path / "one") as saver:
        for number in range(1, 6):
            saver.update(tree(number))
            saver.wait()
            saver.newest()  # waits for the upload, which else may find its checkpoint replaced on the disk
    assert objects(server) == [
        f"runs/a/step-0000000{step}.{name}"
        for step in (1, 2, 4)
        for name in ("arrays-00000.safetensors", "manifest.json")
    ]
    assert names(tmp_path / "one") == ["step-00000004", "step-00000005"]
    with archive(server, tmp_path / "two") as saver:
        assert same(saver.restore(tree(0)), tree(4))
        assert saver.num_updates == 4
    assert names(tmp_path / "two") == ["step-00000004"]
    assert restore(tmp_path / "two", tree(0)).step == 4


@EITHER
def test_the_marker_comes_last(server: BucketServer, tmp_path: Path) -> None:
    with archive(server, tmp_path) as saver:
        saver.save(tree(1))
    assert server.uploads() == ["arrays-00000.safetensors", "manifest.json"]


def test_a_newer_checkpoint_on_the_disk_is_not_fetched(server: BucketServer, tmp_path: Path) -> None:
    with archive(server, tmp_path) as saver:
        for number in range(1, 4):
            saver.update(tree(number))
    server.requests.clear()
    with archive(server, tmp_path) as saver:
        assert same(saver.restore(tree(0)), tree(3))
    assert {request.method for request in server.requests} == {"GET"}
    assert not any("arrays" in request.path for request in server.requests)


def test_the_store_helps_out_when_the_disk_is_damaged(server: BucketServer, tmp_path: Path) -> None:
    with archive(server, tmp_path) as saver:
        for number in range(1, 6):
            saver.update(tree(number))
    for name in ("step-00000004", "step-00000005"):
        flip(tmp_path / name / "arrays-00000.safetensors")
    with archive(server, tmp_path) as saver:
        assert same(saver.restore(tree(0)), tree(4))
        assert [skipped.path.name for skipped in saver.skipped] == ["step-00000005"]
        saver.update(tree(5))
        saver.update(tree(6))
    assert names(tmp_path) == ["step-00000005-1", "step-00000006"]
    with archive(server, tmp_path / "new") as saver:
        assert same(saver.restore(tree(0)), tree(6))


def no_room(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@EITHER
def test_what_is_damaged_in_the_store_is_skipped_and_replaced(
    server: BucketServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with archive(server, tmp_path / "one") as saver:
        for number in range(1, 5):
            saver.update(tree(number))
            saver.newest()  # waits for the upload, which else may find its checkpoint replaced on the disk
    keys = [meta["path"] for chunk in server.store.list("runs/a") for meta in chunk]
    (key,) = [key for key in keys if "step-00000004" in key and "arrays" in key]
    content = bytearray(server.store.get(key).bytes())
    content[-1] ^= 1
    server.store.put(key, bytes(content))
    with archive(server, tmp_path / "two", keep=1) as saver, caplog.at_level(logging.WARNING):
        assert same(saver.restore(tree(0)), tree(2))
        assert [record.getMessage() for record in caplog.records if "has the checksum" in record.getMessage()]
        assert names(tmp_path / "two") == ["step-00000002"]
        saver.update(tree(3))
        saver.save(tree(3))
    assert [name for name in objects(server) if "manifest" in name] == ["runs/a/step-00000003-1.manifest.json"]


def test_nothing_valid_is_an_error(server: BucketServer, tmp_path: Path) -> None:
    server.store.put("runs/a/step-00000002.0123456789abcdef/manifest.json", b"{}")
    server.store.put("runs/a/step-00000002.0123456789abcdef/arrays-00000.safetensors", b"{}")
    words = r"s3://bucket/runs/a: none of its 1 checkpoints is valid: .*checksum"
    with archive(server, tmp_path) as saver, pytest.raises(CheckpointError, match=words):
        saver.restore(tree(0))
    assert names(tmp_path) == []


def test_a_run_that_did_not_restore_mixes_nothing(server: BucketServer, tmp_path: Path) -> None:
    with archive(server, tmp_path / "one") as saver:
        saver.save(tree(0))
    words = "has checkpoints of an earlier run, the newest step-00000000"
    with archive(server, tmp_path / "two", every=1) as saver, pytest.raises(CheckpointError, match=words):
        saver.update(tree(1))


@EITHER
def test_the_newest_stay_and_leftovers_go(server: BucketServer, tmp_path: Path) -> None:
    server.store.put("runs/a/step-00000001.0123456789abcdef/arrays-00000.safetensors", b"left by a crash")
    server.store.put("runs/a/notes.txt", b"of somebody")
    server.store.put("runs/a/step-00000001.0123456789abcdef/notes.txt", b"of somebody, too")
    with archive(server, tmp_path, every=1, keep=2) as saver:
        for number in range(1, 5):
            saver.update(tree(number))
            saver.save(tree(-number))  # a second one of this step, of which only the newest revision counts
    steps = {name.partition(".")[0] for name in objects(server)}
    assert steps == {"runs/a/notes", "runs/a/step-00000001", "runs/a/step-00000003-1", "runs/a/step-00000004-1"}
    assert [name for name in objects(server) if "step-00000001" in name] == ["runs/a/step-00000001.notes.txt"]


def test_copies_under_other_names_are_not_fetched(server: BucketServer, tmp_path: Path) -> None:
    with archive(server, tmp_path, every=1) as saver:
        saver.update(tree(1))
    for meta in [meta for chunk in server.store.list() for meta in chunk]:
        copied = meta["path"].replace("step-00000001", "step-00000099")
        server.store.put(copied, server.store.get(meta["path"]).bytes())
    with archive(server, tmp_path / "new", every=1) as saver:
        assert same(saver.restore(tree(0)), tree(1))
        assert saver.num_updates == 1


@EITHER
def test_what_is_half_removed_is_not_there(server: BucketServer, tmp_path: Path) -> None:
    deletes: list[Request] = []

    def answer(request: Request) -> int | None:
        if request.removes:
            deletes.append(request)
        return 403 if len(deletes) > 1 and request.removes else None

    saver = archive(server, tmp_path, every=1, keep=1)
    saver.save(tree(1))
    server.answer = answer
    saver.update(tree(2))
    with pytest.raises(CheckpointError, match=r"the old checkpoint step-00000000.* cannot be removed: .* 403"):
        saver.close()
    assert objects(server) == [
        "runs/a/step-00000000.arrays-00000.safetensors",
        "runs/a/step-00000001.arrays-00000.safetensors",
        "runs/a/step-00000001.manifest.json",
    ]


def test_a_bucket_takes_one_in_so_many_and_the_first_of_each_run(server: BucketServer, tmp_path: Path) -> None:
    for begin, end in ((1, 6), (6, 13)):
        with archive(server, tmp_path, every=4, keep=9) as saver:
            saver.restore(tree(0))
            for number in range(begin, end):
                saver.update(tree(number))
    steps = {int(name.partition("step-")[2][:8]) for name in objects(server)}
    assert steps == {1, 4, 6, 8, 12}  # an interruption moves none but the first


def test_a_checkpoint_that_fails_on_the_disk_is_not_uploaded(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = archive(server, tmp_path, every=1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_room)
        with pytest.raises(CheckpointError, match="step-00000000: the checkpoint could not be written"):
            saver.save(tree(1))
        saver.newest()
    assert objects(server) == []
    saver.save(tree(2))
    saver.close()
    assert len(objects(server)) == 2


def test_what_the_disk_removes_meanwhile_is_uploaded_whole(server: BucketServer, tmp_path: Path) -> None:
    begun, release = threading.Event(), threading.Event()

    def answer(request: Request) -> int | None:
        if request.method == "PUT":
            begun.set()
            assert release.wait(LIMIT)
        return None

    server.answer = answer
    with archive(server, tmp_path / "one", every=10) as saver:
        saver.save(tree(7))
        assert begun.wait(LIMIT)
        for number in range(1, 6):
            saver.update(tree(number))
            saver.wait()
        assert [name for name in names(tmp_path / "one") if name.startswith("step-00000000")] == []
        release.set()
    assert [name[:4] for name in names(tmp_path / "one")] == ["step", "step"]  # no links are left
    with archive(server, tmp_path / "two") as saver:
        assert same(saver.restore(tree(0)), tree(7))


def test_a_disk_without_room_or_links_is_an_error(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "hardlink_to", no_room)
        saver = archive(server, tmp_path / "one")
        saver.save(tree(3))
        words = r"one/step-00000000: cannot be kept for its upload: \[Errno 28\] .*; expected .* hard links"
        with pytest.raises(CheckpointError, match=words):
            saver.close()
    assert names(tmp_path / "one") == ["step-00000000"]
    with archive(server, tmp_path / "one") as saver:
        saver.restore(tree(0))
        saver.save(tree(3))
    with archive(server, tmp_path / "two") as saver:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", no_room)
            words = r"two: step-00000000-1\.[0-9a-f]+ of s3://bucket/runs/a cannot be written here: \[Errno 28\]"
            with pytest.raises(CheckpointError, match=words):
                saver.restore(tree(0))
        assert names(tmp_path / "two") == []
        assert same(saver.restore(tree(0)), tree(3))


SCRIPT = """
import sys, json, jax.numpy as jnp, braidax as bx
folder, url, client = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
places = [bx.checkpoint.Folder(folder), bx.checkpoint.Bucket(url, client=client)]
saver = bx.Checkpointer(places, bx.Every(1))
saver.restore({"w": jnp.zeros((2_000_000, 4))})
saver.update({"w": jnp.ones((2_000_000, 4))})
saver.close()
"""


def test_a_process_killed_between_parts_leaves_nothing_visible(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_children(monkeypatch, *LOAD_AND_SAVE, codes=(SCRIPT,))
    with archive(server, tmp_path, every=1) as saver:
        saver.save({"w": jnp.zeros((2_000_000, 4))})
    before = objects(server)
    begun, killed = threading.Event(), threading.Event()
    seen: list[Request] = []

    def answer(request: Request) -> int | None:
        if "partNumber" in request.query:
            seen.append(request)
            if len(seen) > 1:
                begun.set()
                assert killed.wait(LIMIT)
        return None

    server.answer = answer
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), URL, json.dumps(server.client)], env=environ)
    try:
        assert begun.wait(LIMIT)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(LIMIT)
        killed.set()
    assert objects(server) == before
    with archive(server, tmp_path / "new", every=1) as saver:
        saver.restore({"w": jnp.zeros((2_000_000, 4))})
        assert saver.num_updates == 0
    with archive(server, tmp_path, every=1) as saver:  # its links are gone, its checkpoint on the disk is whole
        assert names(tmp_path) == ["new", "step-00000000", "step-00000001"]
        assert np.all(saver.restore({"w": jnp.zeros((2_000_000, 4))})["w"] == 1.0)


@EITHER
def test_requests_that_fail_for_a_while_are_tried_again(server: BucketServer, tmp_path: Path) -> None:
    failures = iter([503, 500, 503])

    def answer(request: Request) -> int | None:
        return next(failures, None) if request.method == "PUT" else None

    server.answer = answer
    with archive(server, tmp_path) as saver:
        saver.save(tree(1))
    assert len(objects(server)) == 2


@EITHER
def test_a_failed_upload_is_raised_and_the_disk_goes_on(server: BucketServer, tmp_path: Path) -> None:
    server.answer = lambda request: 403 if request.method == "PUT" else None
    saver = archive(server, tmp_path, every=1)
    saver.save(tree(1))
    words = (
        f"{server.bucket}/runs/a: step-00000000.* cannot be uploaded: the server answered 403: these credentials may "
        "not do that; check them"
    )
    with pytest.raises(CheckpointError, match=words):
        saver.update(tree(2))
    with pytest.raises(CheckpointError, match="step-00000001"):
        saver.close()
    assert names(tmp_path) == ["step-00000000", "step-00000001"]
    assert objects(server) == []


def test_a_store_that_hangs_is_an_error_in_time(server: BucketServer, tmp_path: Path) -> None:
    saver = archive(server, tmp_path)
    release = threading.Event()
    server.answer = lambda request: 500 if release.wait(LIMIT) else None
    saver.timeout_seconds = 0.3
    saver.save(tree(1))
    with pytest.raises(WaitTimeout, match=r"uploading a checkpoint took longer than timeout_seconds=0\.3"):
        saver.close()
    release.set()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "url='s3://': expected s3://bucket/folder"),
        ("https://host/folder", "expected s3://bucket/folder or gs://bucket/folder"),
        ("runs/a", "expected s3://bucket/folder or gs://bucket/folder"),
    ],
)
def test_another_url_is_refused(tmp_path: Path, url: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        bx.Checkpointer([Folder(tmp_path), Bucket(url)], bx.Every(1))
    bx.Checkpointer(tmp_path, bx.Every(1)).close()  # the folder is free


def test_a_bucket_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="keep=0: expected a whole number >= 1; the newest"):
        Bucket(URL, keep=0)
    with pytest.raises(ArgumentError, match="every=0: expected a whole number >= 1, of how many that are due"):
        Bucket(URL, every=0)
    words = "places= have 's3://bucket/runs/a' and no Folder before it, from whose files it is uploaded: expected one"
    with pytest.raises(ArgumentError, match=words):
        bx.Checkpointer(Bucket(URL), bx.Every(1))
    words = f"every=3 of 's3://bucket/runs/a': expected a multiple of every=2 of the folder {tmp_path}/b before it"
    with pytest.raises(ArgumentError, match=words):
        bx.Checkpointer([Folder(tmp_path / "a"), Folder(tmp_path / "b", every=2), Bucket(URL, every=3)], bx.Every(1))


def test_what_is_wrong_with_the_store_is_said_at_once(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_RETRIES", 1)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    elsewhere = {"endpoint": "http://127.0.0.1:9"}
    unknown = {"metadata_endpoint": "http://127.0.0.1:9", "endpoint": server.url, "region": "us-east-1"}

    def opened(url: str, client: dict[str, str]) -> None:
        bx.Checkpointer([Folder(tmp_path), Bucket(url, client=client)], bx.Every(1), timeout_seconds=20.0)

    with pytest.raises(CheckpointError, match=r"s3://no/x: its .* cannot be listed: there is no such"):
        opened("s3://no/x", server.client)
    with pytest.raises(CheckpointError, match="there are no credentials in the environment, and this machine has"):
        opened(URL, unknown)
    with pytest.raises(CheckpointError, match=r"its checkpoints cannot be listed: .*; check the server"):
        opened(URL, {**server.client, **elsewhere})
    with pytest.raises(ArgumentError, match="s3://bucket: obstore's S3Store cannot be made of client="):
        opened(URL, {"no": "such"})
