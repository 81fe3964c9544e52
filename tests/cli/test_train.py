"""`braidax train`: a whole run, Ctrl-C in a real process, wrong input."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from PIL import Image
from typer.testing import CliRunner

from braidax.checkpoint import Adaptive, Every
from braidax.cli import app
from braidax.cli.train import due_checkpoints
from braidax.parallel import Link, Machine
from tests.support.gang.forks import fork_children
from tests.support.tasks.archives import write_cifar100, write_mnist
from tests.support.tasks.criteo import write_criteo

COMMAND = [sys.executable, "-c", "from braidax.cli import main; main()"]
TAKE_LONG = ("digits", "wide_resnet")


def run(*arguments: str | Path) -> tuple[int, str]:
    jax.devices()  # all that the tests have: a command would start as few as its mesh needs
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.output


@pytest.fixture
def quickly_drawn() -> Iterator[None]:
    """Draws first parameters by a generator that compiles quickly, as `quickly_compiled` of tests/tasks does."""
    with jax.default_prng_impl("unsafe_rbg"):
        yield


def clicks(folder: Path) -> list[str | Path]:
    """Returns the task that compiles quickest, of 20 samples to train and 3 to test, on axes of the name `data`."""
    data = write_criteo(folder / "clicks.txt", 23)
    return ["dlrm", "--data", data, "--preset", "tiny", "--strategy", "data=data"]


# Of digits, which take longest, tests/tasks/test_digits.py says by day that they are learnt; the loop is that of all.
@pytest.mark.parametrize("task", [*(pytest.param(name, marks=pytest.mark.slow) for name in TAKE_LONG), "dlrm"])
def test_ctrl_c_saves_and_the_next_run_goes_on_to_the_end(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs, steps_each = {"digits": (3, 11), "wide_resnet": (30, 2), "dlrm": (60, 2)}[task]
    own: list[str | Path] = [task]
    if task == "wide_resnet":
        own += ["--data", write_mnist(tmp_path / "mnist"), "--preset", "tiny"]
    elif task == "dlrm":
        own = clicks(tmp_path)
        fork_children(monkeypatch, "braidax.cli.train", "braidax.tasks.dlrm", "optax", codes=COMMAND[2:])
    if task != "digits":
        own += ["--batch-size", "8", "--mesh", "data=1"]
    options = ["--out", "run", "--epochs", str(epochs), "--trace", "trace.json"]
    arguments = [*COMMAND, "train", *map(str, own), *options]
    # The second process takes over what the first has compiled: the test is about the run, not about the compiler.
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    environment["JAX_DEFAULT_PRNG_IMPL"] = "unsafe_rbg"  # as quickly_drawn
    if task == "digits":  # as a user's would be compiled: many updates run longer than they compile
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    first = subprocess.Popen(
        arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("epoch 1 done"):
            first.send_signal(signal.SIGINT)
            break
    output, errors = first.communicate(timeout=120)
    assert (first.returncode, errors) == (
        130,
        "Ctrl-C: ends behind the step in progress; press it again to end at once\n",
    )
    interrupted = re.search(r"interrupted after step (\d+); run the same command again", output)
    assert interrupted is not None
    reached = int(interrupted[1])
    assert steps_each <= reached < epochs * steps_each

    second = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (second.returncode, second.stderr) == (0, "")
    assert f"going on after step {reached}" in second.stdout
    told = re.search(r"test accuracy ([\d.]+) %  stall \d+\.\d %  [\d,]+ samples/s", second.stdout)
    assert told is not None
    assert task != "digits" or float(told[1]) >= 90
    assert re.search(r"^step [\d.,]+ ms: (compute|dispatch|data wait) \d+ %", second.stdout, re.MULTILINE)
    assert re.search(rf"checkpoint  run/checkpoints \(step {epochs * steps_each}\)", second.stdout)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [*range(1, epochs * steps_each + 1)]
    assert [line["step"] for line in steps if "resumed" in line] == [reached]
    trained = 0
    for trace in ("trace.json", "trace-2.json"):  # one a session
        events = json.loads((tmp_path / trace).read_text())["traceEvents"]
        lanes = [event["cat"] for event in events if event["ph"] == "X"]
        assert set(lanes) == {"read", "decode", "host-to-device", "wait", "step", "loop", "devices", "checkpoint"}
        trained += lanes.count("step")
    assert trained == epochs * steps_each


@pytest.mark.usefixtures("quickly_drawn")
def test_a_finished_run_says_so(tmp_path: Path) -> None:
    arguments = ["train", *clicks(tmp_path), "--out", tmp_path / "run"]
    arguments += ["--batch-size", "8", "--epochs", "1", "--mesh", "data=2", "--tensorboard", tmp_path / "board"]
    code, output = run(*arguments)
    assert code == 0, output
    assert "20 samples to train and 3 to test, 1 epochs of 2 batches of 8" in output
    assert "parameters on 2 virtual CPU devices as data=2" in output
    accuracy = re.search(r"test accuracy ([\d.]+) %", output)
    assert len(list((tmp_path / "board").iterdir())) == 1
    written = files(tmp_path)
    code, again = run(*arguments)
    assert code == 0
    assert accuracy is not None
    assert f"test accuracy {accuracy[1]} %  no step was left to train: --epochs for more" in again
    assert "this run is over: it ended with step 2" in again
    assert "trace " not in again
    assert files(tmp_path) == written


@pytest.mark.usefixtures("quickly_drawn")
def test_other_options_on_a_run_are_said_and_nothing_written_is_lost(tmp_path: Path) -> None:
    arguments = ["train", *clicks(tmp_path), "--out", tmp_path / "run", "--mesh", "data=2"]
    code, output = run(*arguments, "--batch-size", "4", "--epochs", "1", "--seed", "3")
    assert code == 0, output
    assert "other options" not in output
    metrics, before = tmp_path / "run" / "metrics.jsonl", files(tmp_path / "run")
    code, output = run(*arguments, "--batch-size", "10", "--epochs", "2", "--tune", "safe")
    assert code == 0, output
    assert f"tuning      {tmp_path / 'run' / 'tuning.jsonl'}" in output
    assert (tmp_path / "run" / "tuning.jsonl").read_text() == '{"braidax": "tuning", "version": 1}\n'
    assert (
        f"{tmp_path / 'run'} goes on with other options: --batch-size 10 instead of 4, --epochs 2 instead of 1; "
        "--seed stays 3, the order of samples that was begun with, instead of 0"
    ) in " ".join(output.split())
    assert "going on after step 5" in output
    assert "step 7/7  epoch 2/2" in output
    assert metrics.read_text().startswith(before["metrics.jsonl"][1])
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [(line["step"], line["epoch"]) for line in lines if "loss" in line]
    assert steps == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 1), (7, 1)]
    assert [line["step"] for line in lines if "resumed" in line] == [5]
    after = files(tmp_path / "run")
    assert after["trace.json"] == before["trace.json"]
    assert after.keys() - before.keys() >= {"trace-2.json"}

    code, output = run(*arguments, "--batch-size", "10", "--epochs", "2")
    assert (code, f"{tmp_path / 'run'} keeps its --seed 3" in " ".join(output.split())) == (0, True)
    assert files(tmp_path / "run") == after

    code, output = run(*arguments, "--batch-size", "4", "--epochs", "1")  # fewer: it is over, and its options stay
    assert (code, "this run is over: it ended with step 7" in output) == (0, True)
    assert "--batch-size 4 instead of 10, --epochs 1 instead of 2" in " ".join(output.split())
    assert files(tmp_path / "run") == after

    code, output = run("train", "digits", "--out", tmp_path / "run")
    assert code == 1
    assert "has a run of the task 'dlrm', and not of 'digits'; give another folder" in " ".join(output.split())


def files(folder: Path) -> dict[str, tuple[int, str]]:
    """Returns when each file was written, and what is in it, except the lock of a checkpointer."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_text(errors="replace"))
        for path in found
    }


@pytest.mark.slow
def test_cifar_100_trains_from_its_archive(tmp_path: Path) -> None:
    data = write_cifar100(tmp_path / "cifar-100-python.tar.gz")
    arguments = ["train", "wide_resnet", "--data", data, "--out", tmp_path / "run", "--preset", "tiny"]
    code, output = run(*arguments, "--batch-size", "8", "--epochs", "1", "--mesh", "data=2", "--image-size", "48")
    assert code == 0, output
    assert "16 samples to train and 12 to test" in output


@pytest.mark.usefixtures("quickly_drawn")
def test_bad_images_are_skipped_on_demand_and_counted(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 12, 9, 9, 3), np.uint8)
    for name, part in zip(("train", "val"), images, strict=True):
        for number, pixels in enumerate(part):
            path = tmp_path / "images" / name / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    (tmp_path / "images" / "train" / "b" / "7.png").write_bytes(b"no image")
    arguments = ["train", "resnet", "--data", tmp_path / "images", "--preset", "tiny", "--image-size", "8"]
    arguments += ["--batch-size", "12", "--epochs", "1", "--mesh", "data=2", "--out", tmp_path / "run"]
    code, output = run(*arguments)
    assert code == 1
    assert "7.png" in output
    code, output = run(*arguments, "--on-error", "skip")
    assert code == 0, output
    assert f"bad records: skipped, 1 of at most 100 in {tmp_path / 'run' / 'skipped.jsonl'}" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "walking"], 2, "'walking' is no task; there are digits, wide_resnet, resnet"),
        (["train", "wide_resnet"], 2, "wide_resnet needs the path of its data"),
        (["train", "digits", "--preset", "tiny"], 2, "tiny: digits leaves no such choice"),
        (["train", "digits", "--mesh", "4x2"], 2, "such as data=4,model=2"),
        (["plan", "digits", "--mesh", "data4"], 2, "--mesh: 'data4': expected different axes"),
        (["plan", "digits", "--strategy", "data"], 2, "'data': expected different axes with a strategy each"),
        (["plan", "digits", "--strategy", "data=tensr"], 2, "'data=tensr': expected different axes with a strategy"),
        (["plan", "digits", "--measure"], 2, "--measure: no axis has a strategy that chooses by cost; give one, such"),
        (["plan", "digits", "--memory-gb", "1"], 2, "--memory-gb: it is room for a choice by cost; give --measure, to"),
        (["plan", "digits", "--measure", "--memory-gb", "0"], 2, "--memory-gb: 0: expected some room, such as 16"),
        (["plan", "digits", "--measure", "--target", "h100:8"], 2, "it measures the devices that are here, and --tar"),
        (["train", "digits", "--strategy", "host=data"], 1, "names the axis 'host', and the mesh has data, model: us"),
        (["train", "digits", "--out", "afile/x"], 1, "error: --out afile/x: "),
        (["train", "digits", "--out", "afile"], 1, "afile is a file, expected a folder or nothing yet"),
        (["train", "digits", "--epochs", "0"], 2, "--epochs"),
        (["train", "digits", "--batch-size", "12"], 1, "error: batch"),
        (["train", "digits", "--mesh", "data=64"], 1, "error: --mesh data=64 asks for 64 devices"),
        (["train", "wide_resnet", "--data", "nowhere"], 1, "error: nowhere: there is no such file"),
    ],
)
def test_wrong_input_is_named_without_a_traceback(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("afile").touch()
    exit_code, output = run(*arguments)
    assert exit_code == code
    assert message in " ".join(output.split())
    assert "Traceback" not in output


def test_checkpoints_are_due_as_what_is_given_first_says() -> None:
    assert due_checkpoints(None, None, None) == Every(100)
    assert due_checkpoints(7, None, "safe") == Every(7)
    assert due_checkpoints(7, 0.2, "safe") == Adaptive(overhead=0.2)
    assert due_checkpoints(None, None, "safe") == Adaptive(overhead=0.1, max_lost_seconds=60.0)


def test_axes_choose_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure_machine(mesh: Mesh) -> Machine:
        measured.append(mesh.size)
        return Machine(1e18, {"data": Link(1e6, 1e-3)}, name="by hand")

    monkeypatch.setattr("braidax.cli.measure.measure_machine", measure_machine)
    arguments = ("plan", "bert", "--preset", "tiny", "--mesh", "data=8", "--strategy", "data=rotated", "--measure")
    code, output = run(*arguments)
    assert code == 0, output
    assert output.startswith(
        "machine       by hand\na device      computes 1e+06 TFLOP/s\nalong data    to the next 1 MB/s"
    )
    assert "ring          along data: a part's hop is hidden from" in output
    assert re.search(r"params/layers/inner/kernel .* replicated ", output)
    code, output = run(*arguments, "--memory-gb", "0.0005")
    assert code == 0, output
    assert "memory_bytes=500000))" in output
    assert re.search(r"params/layers/inner/kernel .* rotated 2 ", output)
    code, output = run(*(word.replace("rotated", "fully_sharded") for word in arguments), "--memory-gb", "0.0007")
    assert code == 0, output
    assert "FullySharded(machine=Machine(by hand: 1e+06 TFLOP/s; data 1 MB/s), memory_bytes=700000)" in output
    found = {*re.findall(r" (gathered \d, kept|gathered \d|replicated) ", output)}
    assert found == {"gathered 0, kept", "gathered 1, kept", "gathered 1", "replicated"}
    assert measured == [8, 8, 8]


@pytest.mark.usefixtures("quickly_drawn")
def test_a_language_model_trains_with_its_tables_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    code, output = run("plan", "lm1b", "--preset", "tiny", "--mesh", "data=2")
    assert code == 0, output
    assert re.search(r"params/embedding +2000×16 +float32 +rows +128 KB +128 KB +[\d.]+ KB +[\d.]+ % +\[1]", output)
    assert re.search(r"params/lstm/kernel .* replicated .* \[3\]", output)
    assert re.search(r"\[1\] +data: hybrid: gathered by rows .*\[3\] +data: hybrid: used whole by", output, re.DOTALL)
    code, output = run(
        "plan", "lm1b", "--preset", "tiny", "--mesh", "d=4,m=2", "--strategy", "d=hybrid,m=fully_sharded"
    )
    assert code == 0, output
    assert re.search(r"params/embedding .* d: rows .* \[1\]", output)
    assert "m=2 (FullySharded())" in output
    code, output = run("plan", "lm1b", "--preset", "tiny", "--mesh", "data=2", "--json")
    assert {v["placements"][0]["placement"] for v in json.loads(output)["variables"]} == {
        "Rows",
        "Replicated",
    }
    arguments = [
        "train",
        "lm1b",
        "--preset",
        "tiny",
        "--out",
        tmp_path / "run",
        "--mesh",
        "data=2",
        "--batch-size",
        "512",
    ]
    code, output = run(*arguments, "--overhead", "0.1")
    assert code == 0, output
    perplexity = re.search(r"test perplexity ([\d.]+)", output)
    assert perplexity is not None
    assert float(perplexity[1]) < 2000
    code, again = run(*arguments)
    assert f"test perplexity {perplexity[1]}  no step was left to train" in again


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["servers", "parameter_servers_async"])
def test_a_task_trains_with_servers_and_goes_on(tmp_path: Path, strategy: str) -> None:
    data = write_criteo(tmp_path / "train.txt", 40)
    arguments = ["train", "dlrm", "--data", data, "--preset", "tiny", "--mesh", "data=2", "--batch-size", "8"]
    arguments += ["--strategy", f"data={strategy}", "--out", tmp_path / "run"]
    code, output = run(*arguments, "--epochs", "1")
    assert code == 0, output
    told = re.search(r"epochs of (\d+) batches", output)
    assert told is not None, output
    steps = int(told[1])
    code, output = run(*arguments, "--epochs", "2", "--servers", "2")
    assert code == 0, output
    assert f"going on after step {steps}" in output
    assert f"(step {2 * steps})" in output


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {"BRAIDAX_SERVERS": "2"}, "braidax launch has started 2 servers, and --strategy has nothing on servers"),
        (
            ["--strategy", "data=servers", "--servers", "3"],
            {"BRAIDAX_SERVERS": "2"},
            "--servers 3 of braidax train, and braidax launch has started 2: say it there alone",
        ),
        (
            ["--strategy", "data=parameter_servers"],
            {"BRAIDAX_SIZE": "4"},
            "--strategy parameter_servers in 4 processes,",
        ),
        (
            ["--strategy", "data=parameter_servers", "--processes", "2"],
            {},
            "--strategy parameter_servers in 2 processes, whose servers nobody has started: expected braidax launch "
            "--processes 2 --servers 1 --initialize nothing -- braidax train",
        ),
        (
            ["--strategy", "data=parameter_servers", "--processes", "2"],
            {"BRAIDAX_SERVERS": "2"},
            "--strategy parameter_servers in 2 processes",
        ),
    ],
)
def test_servers_that_do_not_fit_are_refused(
    arguments: list[str], variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, output = run("train", "dlrm", *arguments)
    assert code == 1
    assert f"error: {message}" in " ".join(output.split())


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--debug", "train", "wide_resnet", "--data", str(tmp_path / "nowhere")])
    assert type(result.exception).__name__ == "FormatError"
