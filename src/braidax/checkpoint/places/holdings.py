"""What processes keep of one another's checkpoints: who has what, and how it comes back."""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from braidax.checkpoint.format import folders
from braidax.checkpoint.format.loading import Mismatch, load, planned, spoken_of
from braidax.checkpoint.format.manifest import Manifest, OtherFormat, data_file, manifest_file, part_of_manifest
from braidax.checkpoint.format.reading import File, content_of, opened, read_manifest
from braidax.checkpoint.messages import Messages
from braidax.checkpoint.places.lockstep import Lockstep
from braidax.errors import CheckpointError

_logger = logging.getLogger(__name__)


class Whole(NamedTuple):
    """A checkpoint of which every part is held by somebody.

    **Fields:** `step`; `revision`: of that step; `token`: of this checkpoint alone. `holders`: by part the processes
    that have it, by rank.
    """

    step: int
    revision: int
    token: str
    holders: tuple[tuple[int, ...], ...]


class Holdings:
    """The parts of checkpoints that this process has, and what the others have.

    **Arguments:** `messages`: among all that call this. `roots`: folders of checkpoints here.
    """

    def __init__(self, messages: Messages, roots: Iterable[Path]) -> None:
        self._messages = messages
        self._mine: dict[tuple[str, int], Path] = {}
        said: list[tuple[int, int, str, int, int]] = []
        for root in roots:
            for found in folders.checkpoints(root):
                for manifest in _readable(found.path):
                    about = manifest.about
                    self._mine[about.token, manifest.process] = found.path
                    said.append((about.step, found.revision, about.token, about.num_processes, manifest.process))
        heard = messages.all_gather(json.dumps(said).encode())
        everything = [(rank, *each) for rank, words in enumerate(heard) for each in json.loads(bytes(words))]
        holders: dict[tuple[int, str, int], dict[int, list[int]]] = {}
        revisions: dict[str, int] = {}
        for rank, step, revision, token, num_processes, part in everything:
            ranks = holders.setdefault((step, token, num_processes), {}).setdefault(part, [])
            ranks.append(rank)
            revisions[token] = max(revision, revisions.get(token, 0))
        self.num_found = len(holders)
        self.whole = sorted(
            (
                Whole(step, revisions[token], token, tuple(tuple(parts[part]) for part in range(num_processes)))
                for (step, token, num_processes), parts in holders.items()
                if parts.keys() == set(range(num_processes))
            ),
            reverse=True,
        )

    def restore(
        self, whole: Whole, where: Path, like: Any, only: Sequence[str] | None, turn: int
    ) -> tuple[Any, dict[str, str]]:
        """Restores a checkpoint together with all processes, each from its own parts and those of others.

        **Arguments:** `where`: its name, for errors. `like`, `only`: as `Checkpointer.restore` takes them. `turn`:
        which copy of each part is taken: 0 for the nearest.

        **Returns:** the tree, and what went wrong: a `reason` why it is not valid, or another `failure`.
        """
        rank = self._messages.rank
        found: list[tuple[Any, Callable[[Any], Any]]] = []
        manifests = self._gather(whole)
        with contextlib.ExitStack() as stack:

            @functools.cache
            def descriptor(part: int) -> int:
                path = self._mine[whole.token, part] / data_file(part)
                return stack.enter_context(path.open("rb", buffering=0)).fileno()

            def serve(part: int, start: int, num_bytes: int) -> bytes:
                try:
                    return os.pread(descriptor(part), num_bytes, start)
                except OSError as error:
                    _logger.error("%s: part %d cannot be read: %s", where, part, error)
                    return b""  # which is too little

            lockstep = Lockstep(self._messages, serve)

            @contextlib.contextmanager
            def open_file(part: int) -> Generator[File]:
                manifest = content.manifests[part]
                ranks = sorted(whole.holders[part], key=lambda each: (each - rank) % self._messages.size)
                holder = ranks[turn % len(ranks)]
                if holder == rank:
                    with opened(self._mine[whole.token, part] / data_file(part), manifest.data) as file:
                        yield file
                    return
                name = f"{where / data_file(part)} of process {holder}"
                yield File(
                    name, lambda memory, start: lockstep.read(holder, part, memory, start), manifest.data.chunk_bytes
                )

            said: dict[str, str] = {}
            try:
                parsed = [Manifest.from_json(text, name=str(where)) for text in manifests]
                content = content_of(where, parsed)
                way, wants = planned(content, like, only, of=spoken_of(like, rank))
                found.append((load(content, way.like, wants, open_file), way.back))
            except Exception as error:  # noqa: BLE001 - the others must know of it, whatever it is
                said = _said(error)
            finally:
                lockstep.finish()
        heard = [json.loads(bytes(words)) for words in self._messages.all_gather(json.dumps(said).encode())]
        for kind in ("failure", "reason"):
            for process, each in enumerate(heard):
                if kind in each:
                    return None, {kind: f"process {process}: {each[kind]}" if process else each[kind]}
        ((tree, back),) = found
        return back(tree), {}

    def _gather(self, whole: Whole) -> list[bytes]:
        """Returns the manifests of all parts, each as the first process that has it reads it."""
        mine = [part for part, ranks in enumerate(whole.holders) if ranks[0] == self._messages.rank]
        texts = [_text(self._mine[whole.token, part] / manifest_file(part)) for part in mine]
        found: dict[int, bytes] = {}
        for rank, values in enumerate(self._messages.all_gather(texts)):
            parts = [part for part, ranks in enumerate(whole.holders) if ranks[0] == rank]
            found.update(zip(parts, map(bytes, values), strict=True))
        return [found[part] for part in range(len(whole.holders))]


def _said(error: Exception) -> dict[str, str]:
    """Returns what others hear of an error: the `reason` why a checkpoint is not valid, or another `failure`."""
    is_damage = isinstance(error, CheckpointError) and not isinstance(error, OtherFormat | Mismatch)
    words = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return {"reason" if is_damage else "failure": words}


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _logger.error("%s cannot be read: %s", path, error)
        return b""  # which is no manifest


def _readable(folder: Path) -> Generator[Manifest]:
    """Gives the manifests in a folder whose arrays are there."""
    for path in sorted(folder.iterdir()):
        part = part_of_manifest(path.name)
        if part is None:
            continue
        try:
            manifest = read_manifest(folder, part)
            if words := folders.misnamed(folder, manifest.about.step):
                raise CheckpointError(words)
            with opened(folder / data_file(part), manifest.data):
                yield manifest
        except CheckpointError as error:
            _logger.warning("skipped a part of the checkpoint %s: %s", folder, error)
