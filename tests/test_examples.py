"""The examples: each trains and tells it, those of loading in two processes as in one; whole ones go on, too."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import load_file

from tests.support.laws.pages import Pages, fresh_processes, strange
from tests.support.tree import ROOT

LAUNCH = ["-m", "braidax.cli", "launch", "--processes", "2", "--devices-per-process", "2"]
LAST_LINE = re.compile(r"^(?:\[\d\] )?(\d+) steps on (\d+) devices: loss (\S+) -> (\S+)$", re.MULTILINE)


class Trained(NamedTuple):
    """What an example says in its last line."""

    num_steps: int
    num_devices: int
    first_loss: float
    last_loss: float


EXPECTED = {
    "load_jit": Trained(96, 4, 0.9215, 0.3190),  # guessing gives log(2), 0.69
    "load_set_mesh": Trained(64, 4, 4.2344, 0.7073),  # log(32), 3.47; the best there is: log(2), 0.69
    "load_explicit": Trained(192, 4, 2.7963, 0.1059),  # log(16), 2.77
    "load_nnx": Trained(96, 4, 1.0796, 0.0795),  # the variance, 0.4
    "load_equinox": Trained(96, 4, 0.4627, 0.0078),  # likewise
}

TOLD_TWICE = "load_explicit"  # by one process, and by two
ALIKE = ("load_jit", "load_set_mesh", "load_equinox")  # another one stands for them by day: load_nnx

Run = Callable[..., Trained]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs an example with 4 devices in all, and says what it said; it leaves nothing behind."""

    def run(name: str, *before: str) -> Trained:
        ended = subprocess.run(
            [sys.executable, *before, str(ROOT / "examples" / f"{name}.py")],
            cwd=tmp_path,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert list(tmp_path.iterdir()) == []
        assert "Gloo" not in ended.stdout
        said = LAST_LINE.findall(ended.stdout)
        assert len(said) == 1, ended.stdout
        steps, devices, first, last = said[0]
        return Trained(int(steps), int(devices), float(first), float(last))

    return run


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in EXPECTED if name != TOLD_TWICE],
)
def test_an_example_learns(name: str, run: Run) -> None:
    assert_learnt(run(name), name)


@pytest.mark.slow  # a run of two processes is that of one by day, too: tests/test_trained_together.py
def test_two_processes_learn_what_one_does(run: Run) -> None:
    found, expected = run(TOLD_TWICE, *LAUNCH), run(TOLD_TWICE)
    assert_learnt(expected, TOLD_TWICE)
    assert found[:2] == expected[:2]
    assert found[2:] == pytest.approx(expected[2:], rel=2e-3)


def assert_learnt(found: Trained, name: str) -> None:
    """Checks what an example says."""
    assert found[:2] == EXPECTED[name][:2]
    assert found[2:] == pytest.approx(EXPECTED[name][2:], rel=0.02)


@pytest.mark.slow  # a GPT learns from text below
def test_raw_text_is_prepared_and_trained_on(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    found, expected = run("prepare_text"), Trained(140, 4, 6.0118, 0.7100)
    assert found[:2] == expected[:2]
    assert found[2:] == pytest.approx(expected[2:], rel=0.02)
    assert list((tmp_path_factory.getbasetemp() / "cache/braidax/tables").iterdir()) == []  # the frame is gone


def test_all_examples_of_loading_are_tested_and_short() -> None:
    examples = {path.stem: path for path in (ROOT / "examples").glob("load_*.py")}
    assert set(examples) == set(EXPECTED)
    assert max(len(path.read_text().splitlines()) for path in examples.values()) < 60


WHOLE = [
    "dlrm_from_parquet",
    "finetune",
    "gpt_from_text",
    "prepare_text",
    "quickstart",
    "resnet_from_images",
    "torch_images",
]

Told = Callable[..., str]


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # torch's threads would wait for cores that the tests beside have busy
        with fresh_processes() as pages:
            yield pages


@pytest.fixture
def told(pages: Pages, tmp_path: Path) -> Told:
    """Runs an example on one device, as a user does in a folder of theirs, and returns what it writes."""

    def told(name: str, *arguments: str) -> str:
        status, output = pages.run(ROOT / "examples" / name, tmp_path, *arguments)
        assert status == 0, output
        return output

    return told


def number(told: str, pattern: str) -> float:
    """Returns the number that a pattern finds, once."""
    (found,) = re.findall(pattern, told)
    return float(found.replace(",", ""))


def test_a_gpt_learns_from_text_and_goes_on(told: Told, tmp_path: Path) -> None:
    small = ("--length", "32", "--layers", "1", "--epochs")
    output = told("gpt_from_text.py", *small, "1")
    assert "runs/gpt/text.jsonl has generated text" in output
    num_steps = int(number(output, r"documents: ([\d,]+) rows of 32 tokens") // 16)
    assert number(output, r"step (\d+): test perplexity") == num_steps

    lines = (tmp_path / "runs/gpt/text.jsonl").read_text().splitlines()
    (tmp_path / "lines.txt").write_text("".join(json.loads(line)["text"] + "\n" for line in lines))
    again = told("gpt_from_text.py", "--data", "lines.txt", *small, "3")
    assert "generated" not in again
    assert f"going on after step {num_steps}\n" in again
    assert number(again, r"step (\d+): test perplexity") == 3 * num_steps
    perplexities = [number(each, r"test perplexity (\S+);") for each in (output, again)]
    assert perplexities[1] < 0.7 * perplexities[0] < 0.7 * number(output, r"by guessing (\d+)")


@pytest.mark.slow  # resnets learn in tests/tasks, and folders of images are read in tests/data
def test_a_resnet_learns_from_a_folder_of_images(told: Told) -> None:
    output = told("resnet_from_images.py")
    assert "360 images to train on, 40 to test on, of 4 classes: diamonds, lying, rings, standing" in output
    assert number(output, r"step 44: (\d+) % of the test images are right") > 60


@pytest.mark.slow  # a DLRM learns in tests/tasks, and Parquet is read in tests/data
def test_a_dlrm_learns_from_parquet(told: Told, tmp_path: Path) -> None:
    kinds = {
        "clicked": np.arange(900) % 2,
        "price": [None, *np.ones(899)],
        "site": [f"s{row % 7}" for row in range(900)],
    }
    pl.DataFrame(kinds).write_parquet(tmp_path / "mine.parquet")  # text, and a number that is missing
    mine = told(
        "dlrm_from_parquet.py", "--data", "mine.parquet", "--label", "clicked", "--run", "runs/mine", "--rows", "9000"
    )
    assert "810 clicks to train on, 90 to test on: 1 numbers and 2 ids each" in mine
    assert number(mine, r"step 6: test loss (\S+),") < 1
    output = told("dlrm_from_parquet.py")
    assert "18,000 clicks to train on, 2,000 to test on: 2 numbers and 3 ids each" in output
    assert "3 of 11 variables are tables by rows" in output
    assert number(output, r"step 140: test loss (\S+),") < 0.5


@pytest.mark.slow  # a part is trained in tests/parallel/test_trainable.py, and runs are exported in tests/checkpoint
def test_a_head_is_trained_on_a_frozen_trunk(told: Told, tmp_path: Path) -> None:
    output = told("finetune.py")
    assert number(output, r"step 240: (\d+) % of the test samples are right") > 70
    tuned = tmp_path / "tuned.safetensors"
    command = [sys.executable, "-m", "braidax", "export", "runs/finetune/tuned", tuned.name]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    given, found = load_file(tmp_path / "runs/finetune/pretrained.safetensors"), load_file(tuned)
    assert found["head/weight"].shape == (3, 32) != given["head.weight"].shape
    frozen = [name for name in found if name.startswith("trunk")]
    assert len(frozen) == 4
    for name in frozen:
        np.testing.assert_array_equal(found[name], given[name.replace("/", ".")])


@pytest.mark.slow  # tests/torch/test_loader.py::test_a_resumed_loader_goes_on_exactly, and what torch.save keeps
def test_a_torch_script_goes_on_amid_an_epoch(told: Told, tmp_path: Path) -> None:
    command = [sys.executable, "-u", str(ROOT / "examples/torch_images.py"), "--every", "4", "--epochs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert any(line.startswith("step 16, epoch 2/2") for line in run.stdout)
        run.kill()  # of the 22 steps some may still be done
    again = told("torch_images.py", "--data", "runs/torch/images", "--epochs", "3")
    assert 16 <= number(again, r"going on after step (\d+)\n") <= 22
    assert number(again, r"step 33: (\d+) % of the test images") > 60


@pytest.mark.parametrize("name", [*EXPECTED, *(name for name in WHOLE if name != "quickstart")])
def test_examples_use_what_there_is(name: str) -> None:
    """Those of the night, too."""
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert strange(f"```python\n{text}\n```\n") == []


def test_all_whole_examples_are_tested_and_short() -> None:
    examples = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
    assert {*EXPECTED, *WHOLE, "kmeans"} == set(examples)
    assert max(len(path.read_text().splitlines()) for path in examples.values()) < 100


def test_the_notebook_trains_and_goes_on_by_another_plan(told: Told, tmp_path: Path) -> None:
    output = told("first_steps.ipynb")
    assert "(64, 8, 8) P('data',) on 4 devices" in output
    assert "replicated → gathered 0" in output
    assert "going on after step 124\n" in output
    assert "step 124 -> 248 | a device has P('data',) of hidden" in output
    accuracies = json.loads(output.rpartition("epoch after epoch: ")[2])
    assert len(accuracies) == 4
    assert accuracies[3] > 0.95 > accuracies[0]
    assert load_file(tmp_path / "runs/first_steps/model.safetensors")["hidden"].shape == (64, 256)


def test_the_notebook_holds_no_outputs() -> None:
    cells = json.loads((ROOT / "examples/first_steps.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 9
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert all(cell["metadata"] == {} for cell in cells)
