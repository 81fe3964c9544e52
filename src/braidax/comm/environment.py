"""Which rank this process is, as whatever started it says in environment variables."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from braidax.errors import ArgumentError

Origin = Literal["braidax", "open-mpi", "hydra", "slurm", "pmi"]

PLACE_VARIABLES = (
    "BRAIDAX_RANK",
    "BRAIDAX_SIZE",
    "BRAIDAX_LOCAL_RANK",
    "BRAIDAX_LOCAL_SIZE",
    "BRAIDAX_STORE",
    "BRAIDAX_SECRET",
    "BRAIDAX_JOB",
    "BRAIDAX_GENERATION",
    "BRAIDAX_TRANSPORT",
    "BRAIDAX_SERVERS",
    "BRAIDAX_SERVER",
)
"""What says to a process of braidax which rank of which job it is, or which of its servers."""


@dataclass(frozen=True)
class Place:
    """A rank among those that were started together.

    **Fields:** `rank`, `size`: of this process and of all. `local_rank`, `local_size`: the same on its host; None where
    nobody says. `job`: a name without `/` that no other job of this user has at the time; None where nobody gives one.
    `generation`: how often the job was started before. `coordinator_host`: the name of the host of rank 0, where it is
    told. `origin`: whose variables these are.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    job: str | None
    generation: int
    coordinator_host: str | None
    origin: Origin


def rank_from_environment(environ: Mapping[str, str]) -> Place | None:
    """Returns the place of a process that braidax, Slurm, or the mpirun of Open MPI or MPICH started, or None.

    The innermost one is asked first: inside an allocation of Slurm, mpirun's processes see the variables of both. A
    batch script of Slurm itself, outside `srun`, is no rank. `BRAIDAX_JOB` names the job whoever started it.

    **Arguments:** `environ`: the variables, such as `os.environ`.

    **Raises:** `ArgumentError` naming the variable whose value cannot be.
    """
    read = _Reader(environ)
    given = environ.get("BRAIDAX_JOB")
    if "BRAIDAX_RANK" in environ and "BRAIDAX_SIZE" in environ:
        local = read.optional("BRAIDAX_LOCAL_RANK"), read.optional("BRAIDAX_LOCAL_SIZE")
        generation = read.optional("BRAIDAX_GENERATION") or 0
        return read.place(("BRAIDAX_RANK", "BRAIDAX_SIZE"), local, given or "braidax", "braidax", generation=generation)
    if "OMPI_COMM_WORLD_RANK" in environ:
        names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
        local = read.optional("OMPI_COMM_WORLD_LOCAL_RANK"), read.optional("OMPI_COMM_WORLD_LOCAL_SIZE")
        return read.place(names, local, given or _name("mpi", environ.get("PMIX_NAMESPACE")), "open-mpi")
    if "PMI_RANK" in environ and "MPI_LOCALRANKID" in environ:
        local = read.optional("MPI_LOCALRANKID"), read.optional("MPI_LOCALNRANKS")
        return read.place(("PMI_RANK", "PMI_SIZE"), local, given or _name("mpi", environ.get("PMI_JOBID")), "hydra")
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return _slurm(environ, read, given)
    if "PMI_RANK" in environ and "PMI_SIZE" in environ:
        job = given or _name("mpi", environ.get("PMI_JOBID"))
        return read.place(("PMI_RANK", "PMI_SIZE"), (None, None), job, "pmi")
    return None


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables without those that say which rank this process is: its children are others."""
    return {name: value for name, value in environ.items() if name not in PLACE_VARIABLES}


def hosts_of(nodes: str) -> list[str]:
    """Returns the hosts of a list in Slurm's words: `a[1-2,07],b` are `a1`, `a2`, `a07` and `b`.

    **Raises:** `ArgumentError` for what is no such list.
    """
    found: list[str] = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes):
        found += _expanded(entry)
    if not found or nodes.count("[") != nodes.count("]"):
        raise ArgumentError(f"nodes={nodes!r}: expected hosts in the words of Slurm, such as node[1-3,7],login")
    return found


def _expanded(entry: str) -> Iterator[str]:
    before, bracket, behind = entry.partition("[")
    if not bracket:
        yield entry
        return
    ranges, _, after = behind.partition("]")
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ArgumentError(f"nodes={entry!r}: {part!r} is no range of numbers; expected such as node[1-3,7]")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expanded(after):
                yield f"{before}{number:0{len(first)}}{rest}"


def _slurm(environ: Mapping[str, str], read: "_Reader", given: str | None) -> Place:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST")
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE")
    node = read.optional("SLURM_NODEID")
    local_size = None if tasks is None or node is None else _tasks_per_node(tasks)[node]
    return read.place(
        ("SLURM_PROCID", size),
        (read.optional("SLURM_LOCALID"), local_size),
        given or _name("slurm", f"{environ.get('SLURM_JOB_ID')}-{environ['SLURM_STEP_ID']}"),
        "slurm",
        generation=read.optional("SLURM_RESTART_COUNT") or 0,
        coordinator_host=hosts_of(nodes)[0] if nodes else None,
    )


def _tasks_per_node(text: str) -> list[int]:
    """Returns how many tasks each node has: of `4(x2),3` 4, 4 and 3."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ArgumentError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}; expected such as 4(x2),3")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _name(starter: str, text: str | None) -> str | None:
    return None if not text else f"{starter}-{re.sub('[^A-Za-z0-9_.-]', '-', text)}"


class _Reader:
    """Reads numbers of the environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def optional(self, name: str) -> int | None:
        """Returns a number, or None where it is not set."""
        text = self._environ.get(name)
        if text is None:
            return None
        if not text.isascii() or not text.isdecimal():
            raise ArgumentError(f"the environment variable {name} is {text!r}; expected a whole number >= 0")
        return int(text)

    def place(
        self,
        names: tuple[str, str],
        local: tuple[int | None, int | None],
        job: str | None,
        origin: Origin,
        *,
        generation: int = 0,
        coordinator_host: str | None = None,
    ) -> Place:
        """Returns a place whose rank and size are in the variables of these names."""
        rank, size = self.optional(names[0]), self.optional(names[1])
        if rank is None or size is None:
            missing = names[0] if rank is None else names[1]
            raise ArgumentError(f"the environment variable {missing} is not set, though those of {origin} are")
        if rank >= size:
            raise ArgumentError(f"the environment variable {names[0]} is {rank}; expected less than {names[1]}={size}")
        return Place(rank, size, *local, job, generation, coordinator_host, origin)
