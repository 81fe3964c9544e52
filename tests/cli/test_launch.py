"""`braidax launch` and `braidax train --processes`: real processes, signals, wrong input."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import distributed
import numpy as np
import pytest
from typer.testing import CliRunner

from braidax.cli import app
from braidax.gang.program import Program
from tests.gang.programs import wait_until_gone
from tests.gang.test_launch import JOIN
from tests.tasks.archives import write_mnist

COMMAND = [sys.executable, "-m", "braidax.cli"]
JAX = """
import sys, jax, jax.numpy as jnp, pathlib
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("data",))
whole = jax.make_array_from_callback((8,), NamedSharding(mesh, P("data")), lambda index: jnp.arange(8.0)[index])
total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(whole)
seen = f"{jax.process_count()} {jax.device_count()} {float(total)} {sys.argv[1:]}"
pathlib.Path(f"seen-{jax.process_index()}").write_text(seen)
"""


def run(*arguments: str | Path, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_program_is_joined_to_one_jax(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(JAX)
    # What stands behind the program's name is its own.
    ended = run("launch", "-n", "2", "--devices-per-process", "4", "program.py", "--processes", "3", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert (tmp_path / f"seen-{rank}").read_text() == "2 8 28.0 ['--processes', '3']"


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, "")],
)
def test_a_signal_ends_all_ranks(tmp_path: Path, number: int, code: int, told: str) -> None:
    (tmp_path / "program.py").write_text(JOIN + "print('pid', os.getpid())\ntime.sleep(600)\n")
    command = [*COMMAND, "launch", "-n", "2", "--initialize", "nothing", "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, told)
    wait_until_gone(pids, seconds=0.1)


def test_the_exit_code_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(JOIN + "sys.exit(7) if comm.rank else comm.barrier()\n")
    ended = run("launch", "-n", "2", "--initialize", "nothing", "program.py", folder=tmp_path)
    assert ended.returncode == 7
    assert re.search(r"braidax launch: rank 1 \(pid \d+\) failed first: it ended with exit status 7", ended.stderr)
    assert "Traceback" not in ended.stderr.partition("braidax launch:")[2]


def test_a_program_runs_on_dask(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(JOIN + "(__import__('pathlib').Path(str(comm.rank))).touch()\ncomm.close()\n")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        where = ["--gang", "dask", "--scheduler", cluster.scheduler_address]
        ended = run("launch", *where, "--initialize", "nothing", "program.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert {"0", "1"} < {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "error: --processes is not given: say how many processes to start, or on which --hosts"),
        (
            ["-n", "2", "--hosts", "hosts"],
            {},
            "error: --hosts hosts says how many processes there are; leave out --proc",
        ),
        (["--hosts", "hosts"], {}, "error: hosts: cannot be read"),
        (["--gang", "ray"], {}, "error: --gang ray needs --processes"),
        (["--gang", "dask"], {}, "DASK_SCHEDULER_ADDRESS is not set"),
        (
            ["-n", "2"],
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "open-mpi has started 2 processes already",
        ),
        (["--restarts", "1"], {"PMI_RANK": "0", "PMI_SIZE": "1"}, "error: --restarts 1: pmi has started this process"),
        (["-n", "0"], {}, "Invalid value for '--processes'"),
    ],
)
def test_wrong_input_is_named_without_a_traceback(
    arguments: list[str], variables: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["launch", *arguments, "program.py"], env={"COLUMNS": "200", **variables})
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_training_together_passes_every_option_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist")
    seen: list[tuple[Program, int, int]] = []

    def launch_here(program: Program, num_processes: int, *, restarts: int, transport: str) -> int:
        seen.append((program, num_processes, restarts))
        return 3

    monkeypatch.setattr("braidax.cli.launch.launch_here", launch_here)
    options = {
        "--data": tmp_path / "mnist",
        "--out": tmp_path / "run",
        "--epochs": 2,
        "--batch-size": 8,
        "--mesh": "data=2",
        "--preset": "tiny",
        "--image-size": 40,
        "--seed": 5,
        "--checkpoint-every": 7,
        "--overhead": 0.1,
        "--trace": tmp_path / "trace.json",
        "--tensorboard": tmp_path / "board",
    }
    words = [str(word) for option in options.items() for word in option]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    result = CliRunner().invoke(app, ["train", "wide_resnet", *words, "--processes", "2", "--restarts", "4"])
    assert result.exit_code == 3, result.output
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == handlers
    assert seen == [(Program("braidax.cli", ("train", "wide_resnet", *words), "module"), 2, 4)]
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    offered = set(re.findall(r"--[a-z][a-z-]+", shown))
    assert offered == {*options, "--processes", "--restarts", "--help"}


@pytest.mark.slow
def test_processes_that_train_together_do_what_one_does(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist")
    train = ["train", "wide_resnet", "--data", "mnist", "--preset", "tiny", "--batch-size", "8", "--epochs", "1"]
    train += ["--mesh", "data=2"]
    together = [*train, "--processes", "2", "--out", "together"]
    ended = run(*together, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("20 samples to train and 12 to test, 1 epochs of 2 batches of 8") == 1  # one speaks
    again = run(*together, folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "no step was left to train" in again.stdout  # both have restored what one of them wrote
    alone = run(*train, "--out", "alone", folder=tmp_path)
    assert alone.returncode == 0, alone.stderr
    found, expected = (
        [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("together", "alone")
    )
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for name in ("loss", "test_loss", "test_accuracy"):
        values = ([line[name] for line in lines if name in line] for lines in (found, expected))
        np.testing.assert_allclose(*values, rtol=1e-3)
