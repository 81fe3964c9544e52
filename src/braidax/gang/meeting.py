"""How ranks that Slurm or mpirun started find a store: rank 0 serves one, and leaves word in a folder that all see.

The word holds the store's address and a secret made for it, and only the user may read it. When all ranks are on one
host, the folder is a private one in the temporary folder; otherwise it is in the user's cache folder, which the hosts
of a cluster share as a rule; `BRAIDAX_MEETING` names another.
"""

import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Generator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from braidax.comm import TcpStoreServer, open_store
from braidax.comm.environment import Place
from braidax.comm.stores.private import exposure
from braidax.errors import CommError, GangError, WaitTimeout

MEETING = "BRAIDAX_MEETING"
"""The environment variable that names the folder."""

_START_SECONDS = 300.0  # that rank 0 may take to start, on slow disks and busy hosts
_TRY_SECONDS = 5.0  # for one look whether a word is still true: an earlier job may have left it
_PAUSE_SECONDS = 0.1


def environment_of(place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a rank that another program started; `hosting` adds the store.

    **Raises:** `GangError` when ranks on several hosts have no name for their job.
    """
    on_one_host = place.local_size == place.size
    job = place.job
    if job is None and not on_one_host:
        raise GangError(
            f"rank {place.rank} was started by {place.origin}, which gives the job no name; set the environment "
            "variable BRAIDAX_JOB to one, the same for all ranks and new for each job"
        )
    folder = environ.get(MEETING) or str(_private_folder() if on_one_host else _shared_folder(environ))
    told = {
        "BRAIDAX_RANK": str(place.rank),
        "BRAIDAX_SIZE": str(place.size),
        "BRAIDAX_JOB": job or f"mpi-{os.getppid()}",  # whoever started all of them
        "BRAIDAX_GENERATION": str(place.generation),
        "BRAIDAX_TRANSPORT": environ.get("BRAIDAX_TRANSPORT", "tcp"),
        MEETING: folder,
    }
    if place.local_rank is not None and place.local_size is not None:
        told |= {"BRAIDAX_LOCAL_RANK": str(place.local_rank), "BRAIDAX_LOCAL_SIZE": str(place.local_size)}
    return told


@contextlib.contextmanager
def hosting(environ: MutableMapping[str, str]) -> Generator[None, None, None]:
    """Lets rank 0 serve a store as long as the block runs, and tells all ranks of it in `environ`.

    It does nothing where a store is named already, or no folder to meet in.

    **Raises:** `WaitTimeout` when rank 0 leaves no word; `GangError` where there is a file of another's in its place.
    """
    if "BRAIDAX_STORE" in environ or MEETING not in environ:
        yield
        return
    name = f"{environ['BRAIDAX_JOB']}-{environ['BRAIDAX_GENERATION']}.json"
    if Path(name).name != name:
        raise GangError(f"BRAIDAX_JOB={environ['BRAIDAX_JOB']!r}: expected the name of a job, without slashes")
    word = Path(environ[MEETING]) / name
    if environ["BRAIDAX_RANK"] != "0":
        environ["BRAIDAX_STORE"], environ["BRAIDAX_SECRET"] = _found(word)
        yield
        return
    secret = secrets.token_bytes(32)
    on_one_host = environ.get("BRAIDAX_LOCAL_SIZE") == environ["BRAIDAX_SIZE"]
    with TcpStoreServer(host="127.0.0.1" if on_one_host else "", secret=secret) as server:
        left = json.dumps({"store": server.address, "secret": secret.hex()})
        _leave_word(word, left)
        environ["BRAIDAX_STORE"], environ["BRAIDAX_SECRET"] = server.address, secret.hex()
        try:
            yield
        finally:
            with contextlib.suppress(OSError, ValueError):
                if word.read_text() == left:  # another job may have left its own meanwhile
                    word.unlink()


def _leave_word(word: Path, left: str) -> None:
    """Writes a word, in place of one that an earlier job left. **Raises:** `GangError` for what is no word."""
    _make_private(word.parent)
    if os.path.lexists(word) and not _is_word(word):
        raise GangError(
            f"{word} is there, and no word that rank 0 of an earlier job left: expected no such file; move it away, or "
            f"name another folder in the environment variable {MEETING}"
        )
    descriptor, begun = tempfile.mkstemp(dir=word.parent)  # for this user only
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(left)
        Path(begun).replace(word)
    except BaseException:
        Path(begun).unlink(missing_ok=True)
        raise


def _is_word(path: Path) -> bool:
    try:
        told: Any = json.loads(path.read_text())
        return not path.is_symlink() and set(told) == {"store", "secret"} and len(bytes.fromhex(told["secret"])) == 32
    except (OSError, ValueError, TypeError):
        return False


def _found(word: Path) -> tuple[str, str]:
    """Waits for a word of a store that is there, and returns its address and secret."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(OSError, ValueError):
            exposed = exposure(word.parent)
            if exposed:
                raise _not_private(word.parent, exposed)
            next(word.parent.iterdir(), None)  # has a network file system look again
            told = json.loads(word.read_text())
            with contextlib.suppress(CommError, WaitTimeout):
                open_store(told["store"], secret=bytes.fromhex(told["secret"]), timeout_seconds=_TRY_SECONDS).close()
                return told["store"], told["secret"]
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"{word}: rank 0 left no word of its store within {_START_SECONDS:g} s; do all hosts see this folder? "
                f"If not, set {MEETING} to one that they share, or start with braidax launch --hosts"
            )
        time.sleep(_PAUSE_SECONDS)


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"braidax-{os.getuid()}"
    if folder.is_symlink():  # anybody can leave one there
        raise _not_private(folder, "is a link")
    _make_private(folder)
    return folder


def _make_private(folder: Path) -> None:
    """Makes a folder if it is not there. **Raises:** `GangError` where others can get at its files."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        exposed = exposure(folder)
    except OSError as error:
        raise _not_private(folder, f"cannot be made ({error.strerror})") from error
    if exposed:
        raise _not_private(folder, exposed)


def _not_private(folder: Path, why: str) -> GangError:
    return GangError(
        f"{folder} {why}; expected a folder that only this user may enter, because ranks leave a secret there: remove "
        f"it, take it from the others (chmod 700), or name another one in the environment variable {MEETING}"
    )


def _shared_folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "braidax" / "meetings"
