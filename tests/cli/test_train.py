"""`braidax train`: a whole run, Ctrl-C in a real process, wrong input."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from braidax.cli import app
from tests.tasks.archives import write_cifar100, write_mnist

COMMAND = [sys.executable, "-c", "from braidax.cli import main; main()"]


def run(*arguments: str | Path) -> tuple[int, str]:
    jax.devices()  # all that the tests have: a command would start as few as its mesh needs
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.output


def test_ctrl_c_saves_and_the_next_run_goes_on_to_the_end(tmp_path: Path) -> None:
    arguments = [*COMMAND, "train", "digits", "--out", "run", "--epochs", "8", "--trace", "trace.json"]
    # The second process takes over what the first has compiled: the test is about the run, not about the compiler.
    # Both compile in full: many updates run longer than they compile.
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
    first = subprocess.Popen(
        arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("epoch 1 done"):
            first.send_signal(signal.SIGINT)
            break
    output, errors = first.communicate(timeout=120)
    assert (first.returncode, errors) == (130, "")
    interrupted = re.search(r"interrupted after step (\d+); run the same command again", output)
    assert interrupted is not None
    reached = int(interrupted[1])
    assert 11 <= reached < 88

    second = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (second.returncode, second.stderr) == (0, "")
    assert f"going on after step {reached}" in second.stdout
    assert re.search(r"test accuracy 9\d\.\d\d %  stall \d+\.\d %  [\d,]+ samples/s", second.stdout)
    assert re.search(r"checkpoint  run/checkpoints \(step 88\)", second.stdout)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, 89))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["cat"] for event in events if event["ph"] == "X"}
    assert lanes == {"read", "decode", "host-to-device", "wait", "step", "checkpoint"}


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    data = write_mnist(tmp_path / "mnist")
    arguments = ["train", "wide_resnet", "--data", data, "--out", tmp_path / "run", "--preset", "tiny"]
    arguments += ["--batch-size", "8", "--epochs", "1", "--mesh", "data=2", "--tensorboard", tmp_path / "board"]
    code, output = run(*arguments)
    assert code == 0, output
    assert "20 samples to train and 12 to test, 1 epochs of 2 batches of 8" in output
    assert "parameters on 2 virtual CPU devices as data=2" in output
    accuracy = re.search(r"test accuracy ([\d.]+) %", output)
    code, again = run(*arguments)
    assert code == 0
    assert accuracy is not None
    assert f"test accuracy {accuracy[1]} %  no step was left to train" in again
    assert len(list((tmp_path / "board").iterdir())) >= 1


def test_cifar_100_trains_from_its_archive(tmp_path: Path) -> None:
    data = write_cifar100(tmp_path / "cifar-100-python.tar.gz")
    arguments = ["train", "wide_resnet", "--data", data, "--out", tmp_path / "run", "--preset", "tiny"]
    code, output = run(*arguments, "--batch-size", "8", "--epochs", "1", "--mesh", "data=2", "--image-size", "48")
    assert code == 0, output
    assert "16 samples to train and 12 to test" in output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "walking"], 2, "'walking' is no task; there are digits, wide_resnet, resnet"),
        (["train", "wide_resnet"], 2, "wide_resnet needs the path of its data"),
        (["train", "digits", "--preset", "tiny"], 2, "tiny: digits leaves no such choice"),
        (["train", "digits", "--mesh", "4x2"], 2, "such as data=4,model=2"),
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
    exit_code, output = run(*arguments)
    assert exit_code == code
    assert message in " ".join(output.split())
    assert "Traceback" not in output


def test_a_language_model_trains_with_its_tables_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    code, output = run("plan", "lm1b", "--preset", "tiny", "--mesh", "data=2")
    assert code == 0, output
    assert re.search(r"params/embedding +2000×16 +float32 +128,000 +[\d.]+ % +rows +data: hybrid: gathered by", output)
    assert re.search(r"params/lstm/kernel .* replicated .* used whole by", output)
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
    perplexity = re.search(r"test perplexity ([\d.]+) ", output)
    assert perplexity is not None
    assert float(perplexity[1]) < 2000
    code, again = run(*arguments)
    assert f"test perplexity {perplexity[1]}  no step was left to train" in again


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--debug", "train", "wide_resnet", "--data", str(tmp_path / "nowhere")])
    assert type(result.exception).__name__ == "FormatError"
