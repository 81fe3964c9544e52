"""What ranks are told: their program, their place, their share of the GPUs."""

import pytest

from braidax.errors import ArgumentError
from braidax.gang.program import Program, Seat, shares_of_gpus

FOUR = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "program",
    [
        Program("train.py", ("--epochs", "3", "")),
        Program("pkg.train", (), "module", "nothing", 4),
    ],
)
def test_a_program_survives_its_command_line(program: Program) -> None:
    assert Program.parse(list(program.command[3:])) == program


def test_a_seat_is_told_in_variables() -> None:
    told = {"BRAIDAX_RANK": "3", "BRAIDAX_SIZE": "8", "BRAIDAX_LOCAL_RANK": "1", "BRAIDAX_LOCAL_SIZE": "2"}
    assert Seat(3, 8, 1, 2).environment == told
    assert Seat(3, 8, 1, 2, "5,6").environment == {**told, "CUDA_VISIBLE_DEVICES": "5,6"}


@pytest.mark.parametrize(
    ("environ", "found", "num", "each", "shares"),
    [
        ({}, FOUR, 2, None, ["0,1", "2,3"]),
        ({}, FOUR, 2, 1, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "4, 7"}, FOUR, 2, None, ["4", "7"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, FOUR, 2, None, [None, None]),
        ({"JAX_PLATFORMS": "cuda,cpu"}, FOUR, 4, None, FOUR),
        ({"JAX_PLATFORMS": "cpu"}, FOUR, 3, 8, [None, None, None]),
        ({}, [], 3, 8, [None, None, None]),
    ],
)
def test_gpus_are_shared(
    environ: dict[str, str], found: list[str], num: int, each: int | None, shares: list[str | None]
) -> None:
    assert shares_of_gpus(environ, found, num, each) == shares


def test_what_cannot_be_shared_is_told() -> None:
    with pytest.raises(ArgumentError, match="4 GPUs cannot be shared by 3 processes"):
        shares_of_gpus({}, FOUR, 3, None)
    with pytest.raises(ArgumentError, match="devices_per_process=3: 2 processes need 6 GPUs, and there are 4"):
        shares_of_gpus({}, FOUR, 2, 3)
    with pytest.raises(ArgumentError, match="devices_per_process=0: expected at least 1"):
        Program("train.py", devices_per_process=0)
