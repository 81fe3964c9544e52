"""From a store to the disk: a checkpoint comes whole and verified, or not at all."""

import contextlib
import json
from collections.abc import Generator, Mapping
from pathlib import Path

from braidax.checkpoint.format import folders
from braidax.checkpoint.format.manifest import data_file, manifest_file
from braidax.checkpoint.format.reading import opened, read_content, read_manifest
from braidax.checkpoint.places.object_store import Kept, ObjectStore
from braidax.checkpoint.processes import Processes
from braidax.errors import CheckpointError


def fetch(kept: Kept, store: ObjectStore, root: Path, processes: Processes, name: str) -> str:
    """Brings a checkpoint to the disk, together with all processes, each of which fetches and verifies its share.

    **Arguments:** `kept`: the checkpoint. `root`: the folder of the run on the disk. `name`: of the messages about it,
    the same on all processes, used once.

    **Returns:** why it is not valid and not there, empty if it is. **Raises:** `CheckpointError` when the store cannot
    be read or the disk not be written.
    """
    unfinished: list[Path] = []

    def begin() -> str:
        sizes = store.files(kept)
        with _explained(root, kept, store):
            unfinished.append(folders.begin(root, kept.step))
        return json.dumps([unfinished[0].name, sizes])

    def end(said: Mapping[int, str]) -> str:
        for words in said.values():
            if json.loads(words):
                return words
        try:
            step = read_content(unfinished[0]).step
        except CheckpointError as error:
            return json.dumps({"reason": str(error)})
        if step != kept.step:
            return json.dumps({"reason": f"its manifest says step {step}: it is a copy of another, or was renamed"})
        with _explained(root, kept, store):
            folders.finish(unfinished[0], kept.step)
        unfinished.clear()
        return "{}"

    try:
        told = json.loads(processes.lead(f"{name}/begin", begin))
        num_parts = sum(file.endswith(".safetensors") for file in told[1])
        mine = range(processes.index, num_parts, processes.count)
        said = {} if not mine else _receive(kept, store, root / told[0], told[1], mine)
        verdict = json.loads(processes.conclude(name, json.dumps(said), end))
    finally:
        for path in unfinished:
            folders.discard(path)
    if "failure" in verdict:
        raise CheckpointError(verdict["failure"])
    return verdict.get("reason", "")


def _receive(kept: Kept, store: ObjectStore, folder: Path, sizes: Mapping[str, int], parts: range) -> dict[str, str]:
    """Fetches and verifies parts of a checkpoint. **Returns:** what went wrong, if anything did."""
    try:
        for part in parts:
            for name in (manifest_file(part), data_file(part)):
                if name not in sizes:
                    return {"reason": f"{store.url}/{kept.name}/{name} is not there"}
                with _explained(folder.parent, kept, store):
                    store.download(kept, name, sizes[name], folder / name)
    except CheckpointError as error:
        return {"failure": str(error)}
    try:
        for part in parts:
            manifest = read_manifest(folder, part)
            with opened(folder / data_file(part), manifest.data) as file:
                file.verify(manifest.tensors)
    except CheckpointError as error:
        return {"reason": str(error)}
    return {}


@contextlib.contextmanager
def _explained(root: Path, kept: Kept, store: ObjectStore) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{root}: {kept.name} of {store.url} cannot be written here: {error}; make room or mend the disk"
        ) from error
