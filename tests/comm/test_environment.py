"""Which rank a process is, by the variables of whatever started it."""

import pytest

from braidax.comm.environment import PLACE_VARIABLES, Place, hosts_of, rank_from_environment, without_place
from braidax.errors import ArgumentError

BRAIDAX = {"BRAIDAX_RANK": "1", "BRAIDAX_SIZE": "4"}
LOCAL = {"BRAIDAX_LOCAL_RANK": "1", "BRAIDAX_LOCAL_SIZE": "2", "BRAIDAX_JOB": "run", "BRAIDAX_GENERATION": "3"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[08-10],login",
    "SLURM_STEP_TASKS_PER_NODE": "4,2(x1),1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-host/7@1",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        (BRAIDAX, Place(1, 4, None, None, "braidax", 0, None, "braidax")),
        ({**BRAIDAX, **LOCAL}, Place(1, 4, 1, 2, "run", 3, None, "braidax")),
        (SLURM, Place(5, 7, 1, 2, "slurm-4711-0", 0, "node08", "slurm")),
        ({**SLURM, "SLURM_RESTART_COUNT": "2"}, Place(5, 7, 1, 2, "slurm-4711-0", 2, "node08", "slurm")),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}, Place(5, 6, 1, 2, "slurm-4711-0", 0, "node08", "slurm")),
        ({**SLURM, "BRAIDAX_JOB": "mine"}, Place(5, 7, 1, 2, "mine", 0, "node08", "slurm")),
        (OPEN_MPI, Place(2, 3, 0, 1, "mpi-prterun-host-7-1", 0, None, "open-mpi")),
        (HYDRA, Place(0, 2, 0, 2, None, 0, None, "hydra")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "8.0"}, Place(1, 2, None, None, "mpi-8.0", 0, None, "pmi")),
        # mpirun's processes in an allocation of Slurm see whose rank the process is that started them
        ({**SLURM, **OPEN_MPI}, Place(2, 3, 0, 1, "mpi-prterun-host-7-1", 0, None, "open-mpi")),
        ({**SLURM, **HYDRA}, Place(0, 2, 0, 2, None, 0, None, "hydra")),
        # srun --mpi=pmi2 sets PMI's as well
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}, Place(5, 7, 1, 2, "slurm-4711-0", 0, "node08", "slurm")),
        ({**SLURM, **OPEN_MPI, **BRAIDAX}, Place(1, 4, None, None, "braidax", 0, None, "braidax")),
        # a batch script, outside srun
        ({name: text for name, text in SLURM.items() if "STEP" not in name}, None),
    ],
)
def test_a_place_is_recognized(environ: dict[str, str], place: Place | None) -> None:
    assert rank_from_environment(environ) == place


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**BRAIDAX, "BRAIDAX_RANK": "one"}, "the environment variable BRAIDAX_RANK is 'one'; expected a whole number"),
        ({**BRAIDAX, "BRAIDAX_RANK": "4"}, "BRAIDAX_RANK is 4; expected less than BRAIDAX_SIZE=4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, "OMPI_COMM_WORLD_LOCAL_RANK is '-1'"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set, though those of open-mpi are"),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"},
            r"SLURM_STEP_TASKS_PER_NODE is 'many'; expected such as 4\(x2",
        ),
        ({**SLURM, "SLURM_STEP_NODELIST": "node[1-x]"}, "'1-x' is no range of numbers"),
    ],
)
def test_a_variable_that_cannot_be_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rank_from_environment(environ)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("a", ["a"]),
        ("a,b-1.cluster", ["a", "b-1.cluster"]),
        ("n[1-3,07,10-11]", ["n1", "n2", "n3", "n07", "n10", "n11"]),
        ("n[098-101]x,login", ["n098x", "n099x", "n100x", "n101x", "login"]),
        ("r[1-2]c[1-2]", ["r1c1", "r1c2", "r2c1", "r2c2"]),
    ],
)
def test_lists_of_slurm_are_expanded(nodes: str, hosts: list[str]) -> None:
    assert hosts_of(nodes) == hosts


@pytest.mark.parametrize("nodes", ["", "n[1", "n[]", "n[a]"])
def test_what_is_no_list_of_slurm_is_told(nodes: str) -> None:
    with pytest.raises(ArgumentError, match="nodes="):
        hosts_of(nodes)


def test_children_do_not_inherit_a_place() -> None:
    environ = {**dict.fromkeys(PLACE_VARIABLES, "1"), "BRAIDAX_ADDRESS": "10.0.0.1", "PATH": "bin"}
    assert without_place(environ) == {"BRAIDAX_ADDRESS": "10.0.0.1", "PATH": "bin"}
