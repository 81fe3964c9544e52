"""Checkpoints in a bucket: `s3://` and `gs://`.

```
s3://bucket/run/
├── step-00000100.<token>/
│   ├── arrays-00000.safetensors
│   ├── arrays-00001.safetensors
│   ├── manifest-00001.json
│   └── manifest.json               comes last and goes first: without it there is no checkpoint
└── step-00000200.<token>/
```

Objects cannot be renamed, but each appears whole or not at all. The token is that of the checkpoint, so that no object
is ever written anew with another content.
"""

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from braidax.checkpoint.format.manifest import is_name_of_file, manifest_file
from braidax.errors import ArgumentError, CheckpointError
from braidax.objects import Opener, address, first_line, lacks_bucket, lacks_credentials, status_of

_PART_BYTES = 8 * 2**20  # of an object that is sent or fetched as one
_NUM_PARTS = 4  # that are on their way at once
_MAX_PARTS = 10_000  # of an object, says S3
_RETRIES = 8
_REQUEST_SECONDS = 60.0  # retries included; a part of a large object is a request
_SEVERAL = re.compile(r"(step-(\d{8,})(?:-(\d+))?\.[0-9a-f]{16})/([^/]+)")


class Kept(NamedTuple):
    """A checkpoint in a bucket: its `step`, `revision` (of that step), the `name` of its folder."""

    step: int
    revision: int
    name: str


class ObjectStore:
    """The checkpoints of a run in a bucket.

    **Arguments:** `url`: `s3://bucket/folder` or `gs://bucket/folder`. `client`: what obstore's `S3Store` or `GCSStore`
    takes. `timeout_seconds`: the limit of a request, retries included, if that is less than a minute.

    **Raises:** `ArgumentError` for another URL.
    """

    def __init__(self, url: str, client: Mapping[str, Any], *, timeout_seconds: float) -> None:
        root, folder = address(url)
        if not root.startswith(("s3://", "gs://")) or root.endswith("://"):
            raise ArgumentError(f"url={url!r}: expected s3://bucket/folder or gs://bucket/folder")
        limit = min(timeout_seconds, _REQUEST_SECONDS)
        opener = Opener(
            client, retries=_RETRIES, timeout_seconds=limit, purpose="keeping checkpoints in s3:// and gs://"
        )
        self.url = url.rstrip("/")
        self._folder = folder.strip("/")
        self._store = opener.open(root)

    def checkpoints(self) -> list[Kept]:
        """Returns the checkpoints, newest first. **Raises:** `CheckpointError` when they cannot be listed."""
        return _whole(self._listed())

    def files(self, kept: Kept) -> dict[str, int]:
        """Returns the names of the files of a checkpoint, and their bytes. **Raises:** as `checkpoints`."""
        return self._listed().get(kept, {})

    def upload(self, kept: Kept, path: Path) -> None:
        """Sends a file, in parts; it is there once all of it is. **Raises:** `CheckpointError`."""
        part_bytes = max(_PART_BYTES, -(-path.stat().st_size // _MAX_PARTS))
        try:
            self._store.put(
                self._key(kept, path.name), path, chunk_size=part_bytes, max_concurrency=_NUM_PARTS, use_multipart=None
            )
        except Exception as error:
            raise self._explained(f"{kept.name}/{path.name} cannot be uploaded", error) from error

    def download(self, kept: Kept, name: str, num_bytes: int, path: Path) -> None:
        """Fetches a file, in parts; it is durable when this returns. **Raises:** `CheckpointError`, `OSError`."""
        key = self._key(kept, name)

        def part(start: int) -> Any:  # get_ranges would ask for neighbors as one
            return self._store.get_range(key, start=start, end=min(start + _PART_BYTES, num_bytes))

        with path.open("xb") as file, ThreadPoolExecutor(_NUM_PARTS) as threads:
            for first in range(0, num_bytes, _NUM_PARTS * _PART_BYTES):
                starts = range(first, min(first + _NUM_PARTS * _PART_BYTES, num_bytes), _PART_BYTES)
                try:
                    parts = list(threads.map(part, starts))
                except Exception as error:
                    raise self._explained(f"{kept.name}/{name} cannot be fetched", error) from error
                for content in parts:
                    file.write(memoryview(content))
            file.flush()
            os.fsync(file.fileno())

    def retain(self, num_newest: int, obsolete: Collection[str]) -> None:
        """Removes all but the newest checkpoints, and what uploads that never ended have left.

        **Arguments:** `obsolete`: names of checkpoints that are removed in any case.

        **Raises:** `CheckpointError`.
        """
        listed = self._listed()
        newest: dict[int, Kept] = {}  # of each step the newest revision counts
        for kept in _whole(listed):
            if kept.name not in obsolete:
                newest.setdefault(kept.step, kept)
        staying = list(newest.values())[:num_newest]
        self._remove({kept: files for kept, files in listed.items() if kept not in staying})

    def _remove(self, several: Mapping[Kept, Iterable[str]]) -> None:
        for kept, files in several.items():
            first = manifest_file(0)
            keys = [self._key(kept, name) for name in sorted(files, key=lambda name: name != first)]
            try:
                for some in (keys[:1], keys[1:]):
                    if some:
                        self._delete(some)
            except Exception as error:
                raise self._explained(f"the old checkpoint {kept.name} cannot be removed", error) from error

    def _delete(self, keys: list[str]) -> None:
        try:
            self._store.delete(keys)
        except FileNotFoundError:  # so says gs:// when it is asked again because its first answer was lost
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._store.delete(key)

    def _listed(self) -> dict[Kept, dict[str, int]]:
        try:
            metas = [meta for chunk in self._store.list(self._folder or None, chunk_size=1000) for meta in chunk]
        except Exception as error:
            raise self._explained("its checkpoints cannot be listed", error) from error
        start = len(f"{self._folder}/") if self._folder else 0
        found: dict[Kept, dict[str, int]] = {}
        for meta in metas:
            match = _SEVERAL.fullmatch(meta["path"][start:])
            if match is not None and is_name_of_file(match[4]):  # others are somebody else's, and stay
                kept = Kept(int(match[2]), int(match[3] or 0), match[1])
                found.setdefault(kept, {})[match[4]] = meta["size"]
        return found

    def _key(self, kept: Kept, name: str) -> str:
        return "/".join(part for part in (self._folder, kept.name, name) if part)

    def _explained(self, what: str, error: Exception) -> CheckpointError:
        status = status_of(error)
        if lacks_credentials(error):
            why = "there are no credentials in the environment, and this machine has none of its own; "
        elif status in (401, 403) or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
            why = f"the server answered {status or 'that it is forbidden'}: these credentials may not do that; "
        elif lacks_bucket(error):
            return CheckpointError(f"{self.url}: {what}: there is no such bucket; make it, or correct the URL")
        elif status == 404 or isinstance(error, FileNotFoundError):
            return CheckpointError(f"{self.url}: {what}: there is no such object (404): it was removed")
        else:
            why = f"the server answered {status}" if status else first_line(error)
            return CheckpointError(f"{self.url}: {what}: {why}; check the server and the network")
        return CheckpointError(
            f"{self.url}: {what}: {why}check them (for s3:// AWS_ACCESS_KEY_ID and its kin, for gs:// "
            "GOOGLE_APPLICATION_CREDENTIALS), or pass others as client={…}"
        )


def _whole(listed: Mapping[Kept, Mapping[str, int]]) -> list[Kept]:
    return sorted((kept for kept, files in listed.items() if manifest_file(0) in files), reverse=True)
