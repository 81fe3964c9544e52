"""OpenPlaces processes save in several places: what is lost with one place comes back from another, bit for bit."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import braidax as bx
from braidax.checkpoint import Bucket, Folder, Messages, Neighbors
from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.checkpoint.places import passing
from braidax.comm import Communicator
from braidax.errors import BraidaxError, PeerLost, WaitTimeout
from braidax.gang import LocalGang
from braidax.spans import Trace
from tests.support.bucket_server import serving_bucket
from tests.support.checkpoint.leaves import own, tree, whole
from tests.support.checkpoint.saving import names
from tests.support.checkpoint.told import told
from tests.support.data.jax_gang import RUN_SECONDS, jax_gang

SECONDS = 30.0


def neighbors(folder: Path, comm: Communicator, every: int = 2) -> bx.Checkpointer:
    return bx.Checkpointer(Neighbors(folder, comm), bx.Every(every), timeout_seconds=SECONDS)


def saving(comm: Communicator, folder: Path, num_updates: int = 3) -> str:
    """Saves what `tree` gives at update 2, donated at once; its parts travel in several blocks."""
    comm.timeout_seconds = SECONDS
    passing._BLOCK_BYTES = 50_000
    with neighbors(folder, comm) as saver:
        assert saver.restore(0) == 0
        step = jax.jit(lambda state: jax.tree.map(lambda x: x + x.dtype.type(1), state), donate_argnums=0)
        state = tree("saved", whole())
        donated = {name: state[name] for name in ("rows", "replicated")}
        for number in range(num_updates):
            saver.update(state | donated | own(comm.rank))
            if number == 1:
                for _ in range(3):
                    donated = step(donated)
    return ",".join(names(folder / f"slot-{comm.rank}"))


def restoring(comm: Communicator, folder: Path, kind: str) -> str:
    """Restores it as it lay or otherwise, and saves again."""
    comm.timeout_seconds = SECONDS
    like = tree(kind, {name: np.zeros_like(value) for name, value in whole().items()}) | own(9)
    wanted = tree(kind, whole())
    with neighbors(folder, comm) as saver:
        assert saver.newest() == 2
        got = saver.restore(like)
        assert saver.num_updates == 2
        for name, want in wanted.items():
            pair = (jax.random.key_data(got[name]), jax.random.key_data(want)) if name == "keys" else (got[name], want)
            assert got[name].sharding == want.sharding, name
            for ours, theirs in zip(pair[0].addressable_shards, pair[1].addressable_shards, strict=True):
                assert np.asarray(ours.data).tobytes() == np.asarray(theirs.data).tobytes(), name
        assert (got["cursor"], got["numpy"].tolist(), got["local"].tolist()) == ((1, 0), [0, 0, 0], [0, 0])
        saver.save(got)
    return ",".join(names(folder / f"slot-{comm.rank}"))


def test_a_host_that_was_replaced_gets_its_parts_from_its_neighbors(
    tmp_path: Path, two: LocalGang, four: LocalGang
) -> None:
    assert told(four, saving, tmp_path) == ["step-00000002"] * 4
    for slot in range(4):
        parts = sorted({slot, (slot - 1) % 4})
        assert names(tmp_path / f"slot-{slot}" / "step-00000002") == sorted(
            name(part) for part in parts for name in (data_file, manifest_file)
        )
    shutil.rmtree(tmp_path / "slot-1")
    slots = told(four, restoring, tmp_path, "saved")
    assert slots == ["step-00000002-1", "step-00000002", "step-00000002-1", "step-00000002-1"]
    shutil.rmtree(tmp_path / "slot-3")
    assert told(four, restoring, tmp_path, "otherwise")[3] == "step-00000002"
    # Half as many processes take what is left of the others.
    told(two, restoring, tmp_path, "otherwise")
    assert names(tmp_path) == ["slot-0", "slot-1"]
    assert told(two, restoring, tmp_path, "saved")


def restored(comm: Communicator, folder: Path) -> str:
    comm.timeout_seconds = SECONDS
    with neighbors(folder, comm) as saver:
        saver.restore(tree("saved", whole()) | own(0))
        return str(saver.num_updates)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_what_is_damaged_or_lost_on_both_hosts_is_an_error_on_all(tmp_path: Path, four: LocalGang) -> None:
    told(four, saving, tmp_path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    flip(tmp_path / "slot-2" / "step-00000002" / "arrays-00002.safetensors")
    assert told(four, restored, tmp_path) == ["2"] * 4
    flip(tmp_path / "slot-3" / "step-00000002" / "arrays-00002.safetensors")
    for words in told(four, restored, tmp_path):
        assert words.startswith(f"NothingValid: {tmp_path}: none of 1 checkpoints is valid: "), words
        assert "arrays-00002.safetensors" in words
        assert "the file was changed" in words
    for slot in (1, 2):
        shutil.rmtree(tmp_path / "copy" / f"slot-{slot}")
    for words in told(four, restored, tmp_path / "copy"):
        assert "none of 1 checkpoints is valid: of 1 some parts are nowhere; move them away" in words


def failing(comm: Communicator, folder: Path, who: int) -> str:
    """Saves three times; the memory of one process is full at the second."""
    comm.timeout_seconds = SECONDS
    found: list[str] = []
    fsync = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with neighbors(folder, comm, 1) as saver:
        for number in (1, 2, 3):
            state = a_tree(number)
            saver.num_updates = number
            os.fsync = full if comm.rank == who and number == 2 else fsync
            try:
                saver.save(state)
            except BraidaxError as error:
                found.append(f"{error} {names(folder / f'slot-{comm.rank}')}")
            finally:
                os.fsync = fsync
    return f"{found} {names(folder / f'slot-{comm.rank}')}"


def test_what_fails_in_one_process_fails_in_all(tmp_path: Path, two: LocalGang) -> None:
    for words in told(two, failing, tmp_path, 1):
        part = "process 1 could not write its part: OSError(28, 'No space left on device'). Earlier checkpoints are"
        assert part in words
        assert "['step-00000001']" in words
        assert words.endswith("['step-00000003']")


def a_tree(number: int) -> dict[str, Any]:
    devices = Mesh(np.array(jax.devices()), ("a",))
    return {"x": jax.device_put(jnp.full((8, 64), number), NamedSharding(devices, P("a")))}


def recorded(comm: Communicator, folder: Path) -> str:
    """Saves twice, and tells what it had made durable, named and removed meanwhile, in order."""
    comm.timeout_seconds = SECONDS
    events: list[tuple[str, str]] = []
    fsync, rename, unlink = os.fsync, Path.rename, Path.unlink

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("durable", str(Path(f"/proc/self/fd/{descriptor}").readlink()).removeprefix(str(folder))))

    def renamed(path: Path, target: Path) -> Path:
        events.append(("named", str(target).removeprefix(str(folder))))
        return rename(path, target)

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        events.append(("removed", path.name))
        unlink(path, missing_ok)

    with neighbors(folder, comm, 1) as saver:
        saver.save(a_tree(1))
        saver.num_updates = 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", synced)
            patch.setattr(Path, "rename", renamed)
            patch.setattr(Path, "unlink", unlinked)
            saver.save(a_tree(2))
    return json.dumps(events)


def test_what_a_neighbor_keeps_is_durable_before_the_older_goes(tmp_path: Path, two: LocalGang) -> None:
    for rank, words in enumerate(told(two, recorded, tmp_path)):
        root, events = f"/slot-{rank}", [tuple(event) for event in json.loads(words)]
        named = events.index(("named", f"{root}/step-00000002"))
        durable = [path for what, path in events[:named] if what == "durable"]
        unfinished = os.path.dirname(durable[0])  # noqa: PTH120 - it was renamed since
        files = {f"{unfinished}/{name(part)}" for part in (0, 1) for name in (data_file, manifest_file)}
        assert {*files, unfinished} == set(durable)
        assert durable[-1] == unfinished  # the names in it come last
        gone = next(at for at, (what, path) in enumerate(events) if what != "durable" and "unfinished" in path)
        assert gone > named
        assert ("durable", root) in events[named:gone]
        assert [what for what, _ in events[gone:]] == ["named", *["removed"] * 4]
        assert names(tmp_path / f"slot-{rank}") == ["step-00000002"]


def missing(comm: Communicator, folder: Path) -> str:
    """Process 1 waits no longer at the second update, whose checkpoint process 0 begins."""
    comm.timeout_seconds = SECONDS
    found: list[str] = []
    with neighbors(folder, comm, 1) as saver:
        settle = saver._settle

        def late() -> Exception | None:
            assert settle() is None
            raise WaitTimeout("it took too long")

        for number in (1, 2, 3):
            saver._settle = late if comm.rank and number == 2 else settle
            try:
                saver.update(a_tree(number))
            except BraidaxError as error:
                found.append(f"{number}: {error}")
        saver.close()
    with neighbors(folder, comm, 1) as saver:
        got = saver.restore(a_tree(0))["x"].addressable_data(0)
        found.append(f"{saver.num_updates} {np.unique(got)} {names(folder / f'slot-{comm.rank}')}")
    return json.dumps(found)


def test_processes_that_parted_in_one_checkpoint_meet_in_the_next(tmp_path: Path, two: LocalGang) -> None:
    first, second = (json.loads(words) for words in told(two, missing, tmp_path))
    assert first[0] == (
        f"3: {tmp_path}: process 1 could not copy its part: it took too long. Earlier checkpoints are untouched"
    )
    assert second[0] == "2: it took too long"
    assert first[1:] == second[1:] == ["3 [3] ['step-00000003']"]


def parting(comm: Communicator, folder: Path) -> str:
    comm.timeout_seconds = SECONDS
    with neighbors(folder, comm, 1) as saver:
        saver.num_updates = 1
        saver.save(a_tree(1))
        saver.num_updates = 2 + comm.rank
        saver.save(a_tree(2))
    return ""


def test_processes_that_save_other_steps_are_told(tmp_path: Path, two: LocalGang) -> None:
    for words in told(two, parting, tmp_path):
        assert "saves step 3 and process" in words or "saves step 2 and process" in words
        assert (
            "expected all processes to call `update` after the same steps. Earlier checkpoints are untouched" in words
        )
    assert names(tmp_path / "slot-0") == names(tmp_path / "slot-1") == ["step-00000001"]


def dying(comm: Communicator, folder: Path, who: int) -> None:
    """Saves at updates 2 and 4; one process is killed while the second goes to its neighbor."""
    comm = comm.split(0)
    comm.timeout_seconds = SECONDS
    pass_on = passing.pass_on

    def kill(messages: Messages, position: Any, folder: Path, sizes: Any) -> Any:
        if folder.name.startswith(".step-00000004") and comm.rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        return pass_on(messages, position, folder, sizes)

    passing.pass_on = kill
    saver = neighbors(folder, comm)
    later = {name: np.zeros_like(value) for name, value in whole().items()}
    for number in range(1, 5):
        saver.update(tree("saved", whole() if number < 3 else later) | own(comm.rank))
    saver.close()


# By day hosts are replaced above, and a run whose process is killed goes on in tests/test_trained_together.py.
@pytest.mark.slow
def test_a_killed_process_is_replaced_and_all_go_on_from_the_last_whole_one(tmp_path: Path, two: LocalGang) -> None:
    with pytest.raises(PeerLost, match="rank 1"), jax_gang(2, 4) as gang:
        gang.run(dying, tmp_path, 1, timeout_seconds=RUN_SECONDS)
    assert "step-00000002" in names(tmp_path / "slot-0")
    shutil.rmtree(tmp_path / "slot-1")
    assert told(two, restoring, tmp_path, "saved") == ["step-00000002-1", "step-00000002"]


def both(comm: Communicator, folder: Path, num_updates: int) -> str:
    comm.timeout_seconds = SECONDS
    places = [Neighbors(folder / "memory", comm), Folder(folder / "disk", every=3)]
    with bx.Checkpointer(places, bx.Every(1), timeout_seconds=SECONDS) as saver:
        devices = Mesh(np.array(jax.devices()), ("a",))
        state = {"x": jax.device_put(jnp.zeros((8, 64)), NamedSharding(devices, P("a")))}
        state = saver.restore(state)
        first = saver.num_updates, float(state["x"].addressable_data(0)[0, 0])
        for _ in range(num_updates):
            state = {"x": state["x"] + 1.0}
            saver.update(state)
    return f"{first} {saver.num_updates}"


def test_the_newest_comes_from_neighbors_or_from_the_disk(tmp_path: Path, two: LocalGang) -> None:
    assert told(two, both, tmp_path, 4) == ["(0, 0.0) 4"] * 2
    assert names(tmp_path / "disk") == ["step-00000001", "step-00000003"]
    shutil.rmtree(tmp_path / "memory" / "slot-0")
    assert told(two, both, tmp_path, 0) == ["(4, 4.0) 4"] * 2
    shutil.rmtree(tmp_path / "memory")
    assert told(two, both, tmp_path, 1) == ["(3, 3.0) 4"] * 2


def refused(comm: Communicator, folder: Path) -> str:
    """Process 1 has a leaf that nobody can save; all go on together."""
    comm.timeout_seconds = SECONDS
    found: list[str] = []
    places = [Neighbors(folder / "memory", comm), Folder(folder / "disk")]
    with bx.Checkpointer(places, bx.Every(1), timeout_seconds=SECONDS) as saver:
        for number in (1, 2, 3):
            state = a_tree(number) | ({"text": "text"} if comm.rank and number == 2 else {})
            for call in (lambda state=state: saver.update(state), saver.newest):
                try:
                    call()
                except BraidaxError as error:
                    found.append(f"{number}: {error}")
        found.append(str(saver.newest()))
    return json.dumps(found)


def test_what_one_process_cannot_save_all_hear_of_at_once_in_every_place(tmp_path: Path, two: LocalGang) -> None:
    first, second = (json.loads(words) for words in told(two, refused, tmp_path))
    why = f"{tmp_path}/memory: process 1 could not copy its part: CheckpointError: leaf 'text' is of type str: expected"
    assert second[0].startswith("2: leaf 'text' is of type str: expected a jax.Array")
    assert second[1].startswith(f"2: process 0 takes no part in it any more: {why}")
    assert first[0].startswith(f"2: {why}")
    assert first[1:] == second[2:] == ["3"]
    assert names(tmp_path / "disk") == ["step-00000001", "step-00000003"]


def counting(comm: Communicator, folder: Path) -> str:
    """Saves once, and tells what went over the wire for that."""
    comm.timeout_seconds = SECONDS
    with neighbors(folder, comm, 1) as saver:
        comm.trace = Trace()
        saver.save(tree("saved", whole()) | own(comm.rank))
        spans = [(span.name, span.num_bytes) for span in comm.trace.spans]
    files = [folder / f"slot-{comm.rank}" / "step-00000000" / name(comm.rank) for name in (data_file, manifest_file)]
    sent = sum(num_bytes for name, num_bytes in spans if name == "send")
    more = sum(num_bytes for name, num_bytes in spans if name != "send")
    return json.dumps([sorted({name for name, _ in spans}), sent, sum(path.stat().st_size for path in files), more])


def test_one_copy_of_each_part_crosses_the_wire(tmp_path: Path, four: LocalGang) -> None:
    for words in told(four, counting, tmp_path):
        calls, num_sent, num_bytes, num_more = json.loads(words)
        assert calls == ["all_gather", "recv", "send"]
        assert num_sent == num_bytes > 50_000
        assert num_more < 2_000  # what they tell each other


def archiving(comm: Communicator, folder: Path, client: dict[str, Any]) -> str:
    """Restores, from the store where the disk has nothing, and saves."""
    like = tree("otherwise", {name: np.zeros_like(value) for name, value in whole().items()}) | own(9)
    places = [Folder(folder), Bucket("s3://bucket/run", every=2, client=client)]
    with bx.Checkpointer(places, bx.Every(1), timeout_seconds=SECONDS) as saver:
        got = saver.restore(like)
        first = saver.num_updates, int(np.sum(got["rows"].addressable_data(0) != 0) > 0)
        for _ in range(2):
            saver.update(tree("saved", whole()) | own(comm.rank))
    return f"{first}"


def test_processes_share_an_upload_and_a_download(tmp_path: Path, two: LocalGang) -> None:
    with serving_bucket() as server:
        assert told(two, archiving, tmp_path / "one", server.client) == ["(0, 0)"] * 2
        assert server.uploads()[-1] == "manifest.json"
        files = [name(part) for part in (0, 1) for name in (data_file, manifest_file)]
        assert sorted(server.uploads()) == sorted(2 * files)
        assert told(two, archiving, tmp_path / "two", server.client) == ["(2, 1)"] * 2
    first, second = tmp_path / "one" / "step-00000002", tmp_path / "two" / "step-00000002"
    for name in names(first):
        assert (first / name).read_bytes() == (second / name).read_bytes()
