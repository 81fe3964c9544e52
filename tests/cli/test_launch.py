"""`braidax launch` and `braidax train --processes`: real processes, signals, wrong input."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

from braidax.cli import app
from braidax.cli.tasks import make_task
from braidax.cli.workers import Seat
from braidax.data import DataLoader
from braidax.gang.program import Program
from braidax.loop import evaluate
from braidax.parallel import DataParallel, parallelize
from tests.support.gang.launched import JOIN, SAVE, STOPS
from tests.support.gang.programs import wait_until_gone
from tests.support.tasks.archives import write_mnist
from tests.support.tasks.criteo import write_criteo
from tests.support.tree import ROOT

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


FIT = """
import jax, numpy as np, optax
import braidax as bx
from tests.support.trained_together import init, loss
samples = {"x": np.ones((48, 4), np.float32), "y": np.arange(48, dtype=np.float32)}
source, mesh = bx.open(samples), jax.make_mesh((2,), ("data",))
strategies = {"data": bx.DataParallel()}
step = bx.parallelize(loss, optax.adam(0.1), mesh, strategies, init=init, batch=source.batch_spec(8))
report = bx.Report(show="plain", metrics="run/metrics.jsonl")
with (
    bx.DataLoader(source, mesh, step.batch_shardings, batch_size=8, seed=1, epochs=None) as loader,
    bx.Checkpointer("run/checkpoints", bx.Every(10_000)) as saver,
):
    bx.fit(step, step.init(jax.random.key(2)), loader, saver=saver, report=report)
"""
DIGITS = ["train", "digits", "--processes", "2", "--mesh", "data=2", "--batch-size", "32", "--epochs", "1000"]


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
    [
        (signal.SIGINT, 130, "interrupted\n"),
        pytest.param(signal.SIGTERM, 143, "", marks=pytest.mark.slow),  # by day it stops a run below
        pytest.param(signal.SIGHUP, 129, "", marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_all_ranks_when_they_have_saved(tmp_path: Path, number: int, code: int, told: str) -> None:
    (tmp_path / "program.py").write_text(JOIN + SAVE + "print('pid', os.getpid())\ntime.sleep(600)\n")
    command = [*COMMAND, "launch", "-n", "2", "--grace-seconds", "20", "--initialize", "nothing", "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, STOPS.format(20) + "\n" + told)
    assert sorted(output.splitlines()) == ["[0] saved", "[1] saved"]
    wait_until_gone(pids, seconds=0.1)


# By night a second run goes on: by day that of one process in test_train.py, of two in tests/test_trained_together.py.
@pytest.mark.parametrize(
    ("command", "num_runs"),
    [
        (["launch", "-n", "2", "program.py"], 1),
        pytest.param(["launch", "-n", "2", "program.py"], 2, marks=pytest.mark.slow),
        pytest.param([*DIGITS, "--out", "run"], 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_takes_a_last_checkpoint_and_goes_on(
    tmp_path: Path, command: list[str], num_runs: int
) -> None:
    (tmp_path / "program.py").write_text(FIT)
    # The second run takes over what the first has compiled: the test is about the end, not about the compiler.
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(ROOT),
    }
    reached = [0]
    for _ in range(num_runs):
        with subprocess.Popen(
            [*COMMAND, *command],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                next(line for line in process.stdout if re.match(r"\[0\] step \d+", line))
                process.send_signal(signal.SIGTERM)
                output, errors = process.communicate(timeout=100)
            finally:
                process.kill()
        assert process.returncode == 143, output + errors
        assert STOPS.format(30) in errors.splitlines()
        assert "had to kill" not in errors
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if "loss" in line]
        checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
        assert checkpoints[-1] == f"step-{steps[-1]:08d}"
        assert steps == list(range(1, steps[-1] + 1))
        assert steps[-1] > reached[-1]
        reached.append(steps[-1])


def test_the_exit_code_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(JOIN + "sys.exit(7) if comm.rank else comm.barrier()\n")
    ended = run("launch", "-n", "2", "--initialize", "nothing", "program.py", folder=tmp_path)
    assert ended.returncode == 7
    assert re.search(r"braidax launch: rank 1 \(pid \d+\) failed first: it ended with exit status 7", ended.stderr)
    assert "Traceback" not in ended.stderr.partition("braidax launch:")[2]


@pytest.mark.slow  # tests/gang/test_dask.py::test_a_worker_is_as_before_when_the_job_is_over; the options below
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
        (["-n", "1", "--grace-seconds", "-1"], {}, "Invalid value for '--grace-seconds'"),
        (["-n", "1", "--grace-seconds", "inf"], {}, "error: grace_seconds=inf: expected a finite number"),
        (
            ["--gang", "ray", "-n", "2", "--grace-seconds", "9"],
            {},
            "error: --grace-seconds 9: --gang ray ends its ranks at once; leave it out",
        ),
        (
            ["--hosts", "hosts", "--servers", "2"],
            {},
            "error: --servers 2 with --hosts hosts: the file says where servers are; name them there, such as `node1",
        ),
        (["--gang", "dask", "-n", "2", "--servers", "1"], {}, "error: --servers 1 with --gang dask: servers are"),
        (["--servers", "1"], {"PMI_RANK": "0", "PMI_SIZE": "1"}, "error: --servers 1 with no --processes"),
        (["-n", "1", "--servers", "-1"], {}, "Invalid value for '--servers'"),
        (
            ["--grace-seconds", "9"],
            {"PMI_RANK": "0", "PMI_SIZE": "1"},
            "error: --grace-seconds 9: pmi has started this process, and ends it by its own rules",
        ),
    ],
)
def test_wrong_input_is_named_without_a_traceback(
    arguments: list[str], variables: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("")
    result = CliRunner().invoke(app, ["launch", *arguments, "program.py"], env={"COLUMNS": "200", **variables})
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_training_together_passes_every_option_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist")
    seen: list[tuple[Program, int, int, float]] = []

    def launch_here(
        program: Program, num_processes: int, *, servers: int, restarts: int, transport: str, grace_seconds: float
    ) -> int:
        assert servers == 0  # the first process has them
        seen.append((program, num_processes, restarts, grace_seconds))
        return 3

    monkeypatch.setattr("braidax.cli.launch.launch_here", launch_here)
    options = {
        "--data": tmp_path / "mnist",
        "--out": tmp_path / "run",
        "--epochs": 2,
        "--batch-size": 8,
        "--mesh": "data=2",
        "--strategy": "data=data_parallel",
        "--servers": 3,
        "--preset": "tiny",
        "--image-size": 40,
        "--seed": 5,
        "--checkpoint-every": 7,
        "--overhead": 0.1,
        "--tune": "safe",
        "--on-error": "skip",
        "--trace": tmp_path / "trace.json",
        "--tensorboard": tmp_path / "board",
    }
    words = [str(word) for option in options.items() for word in option]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    together = ["--processes", "2", "--restarts", "4", "--grace-seconds", "9"]
    result = CliRunner().invoke(app, ["train", "wide_resnet", *words, *together])
    assert result.exit_code == 3, result.output
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == handlers
    assert seen == [(Program("braidax.cli", ("train", "wide_resnet", *words), "module"), 2, 4, 9.0)]
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    offered = set(re.findall(r"--[a-z][a-z-]+", shown))
    assert offered == {*options, "--processes", "--restarts", "--grace-seconds", "--help"}


@pytest.mark.slow
def test_a_task_trains_with_servers_of_the_launcher(tmp_path: Path) -> None:
    write_criteo(tmp_path / "train.txt", 40)
    train = ["train", "dlrm", "--data", "train.txt", "--preset", "tiny", "--batch-size", "8", "--epochs", "1"]
    train += ["--mesh", "data=2", "--strategy", "data=servers"]
    ended = run(
        *["launch", "-n", "2", "--servers", "2", "--transport", "ucx", "--", "braidax", *train, "--out", "two"],
        folder=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert "braidax launch" not in ended.stderr  # the servers were met
    alone = run(*train, "--out", "one", folder=tmp_path)
    assert alone.returncode == 0, alone.stderr
    lines = ((tmp_path / out / "metrics.jsonl").read_text().splitlines() for out in ("two", "one"))
    found, expected = ([found["loss"] for found in map(json.loads, each) if "loss" in found] for each in lines)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workers_of_the_launcher_train_a_task_and_go_on(tmp_path: Path) -> None:
    """Two workers, each of its own samples, twice an epoch: one device that takes both parts of each batch."""
    write_criteo(tmp_path / "train.txt", 40)
    train = ["train", "dlrm", "--data", "train.txt", "--preset", "tiny", "--batch-size", "8", "--mesh", "data=1"]
    train += ["--strategy", "data=parameter_servers", "--out", "two"]
    for epochs in ("1", "2"):
        launch = ["launch", "-n", "2", "--servers", "2", "--initialize", "nothing", "--", "braidax"]
        ended = run(*launch, *train, "--epochs", epochs, folder=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("parameters on") == 1, ended.stdout
        assert ended.stdout.count("test accuracy") == 1, ended.stdout
    assert "going on after step 4" in ended.stdout, ended.stdout
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, 9)]
    found = [line["test_loss"] for line in lines if "test_loss" in line]
    np.testing.assert_allclose(found, losses_of_one_device(tmp_path), rtol=1e-4)


def losses_of_one_device(folder: Path) -> list[float]:
    """Returns the test losses of the task behind each of two epochs, where one device takes the batches of both."""
    task = make_task("dlrm", folder / "one", path=folder / "train.txt", preset="tiny", image_size=None)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    made: dict[str, Any] = {"init": task.init, "batch": task.train.batch_spec(8), "microbatches": 2}
    step = parallelize(task.loss, task.optimizer(4), mesh, {"data": DataParallel()}, **made)
    state, losses = step.init(jax.random.key(0)), list[float]()
    parts = [Seat(number, 2).own_samples(task.train) for number in range(2)]
    loaders = [DataLoader(part, mesh, P("data"), batch_size=4, seed=0, epochs=1) for part in parts]
    for _ in range(2):
        for batches in zip(*loaders, strict=True):
            both = jax.tree.map(lambda *leaves: np.stack(leaves, 1).reshape(8, *leaves[0].shape[1:]), *batches)
            state, _ = step.update(state, both)
        test = DataLoader(task.test, mesh, P("data"), batch_size=4, seed=None, remainder="pad", epochs=1)
        losses.append(evaluate(step, state, test)["loss"])
    return losses
