"""`braidax inspect`: what the loader would see."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from braidax.cli import app
from tests.support.data.storage.faulty_server import serving
from tests.support.tasks.archives import write_cifar100, write_mnist


def run(*arguments: str | Path) -> tuple[int, str]:
    """Returns exit code and output, blanks collapsed."""
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "160"})
    return result.exit_code, re.sub(r"[ ─━┃│|]+", " ", result.output)


def test_it_shows_format_samples_and_leaves(tmp_path: Path) -> None:
    code, output = run(write_cifar100(tmp_path / "cifar-100-python.tar.gz"))
    assert code == 0
    for expected in ("format CIFAR-100 (python)", "samples 16", "image [32, 32, 3] uint8 3,072", "label [] int32 4"):
        assert expected in output
    assert "classes 100: class0, class1" in output


def test_it_shows_how_a_batch_lies_on_a_mesh(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    code, output = run(tmp_path, "--mesh", "data=4,model=2", "--batch-size", "8")
    assert code == 0
    assert "a batch of 8 on 8 virtual CPU devices as data=4 x model=2" in output
    assert "2 batches per epoch" in output
    assert "image [8, 28, 28, 1] [2, 28, 28, 1] 1,568 P('data'" in output


def test_a_spec_may_split_other_dims(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((16, 6), np.float32))
    code, output = run(tmp_path / "x.npz", "--mesh", "data=4,model=2", "--spec", "data,model", "--batch-size", "8")
    assert code == 0
    assert "x [8, 6] [2, 3] 24 P('data', 'model')" in output


def test_it_shows_leaves_of_varying_size_and_the_index(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "grün", "n": 1, "ids": [1, 2], "meta": {}}\n{"text": "", "n": 2, "ids": [], "meta": {}}\n'
    )
    code, output = run(path)
    assert code == 1
    assert "columns=['text', 'n', 'ids']" in output
    code, output = run(path, "--columns", "text,n,ids")
    assert code == 0
    for expected in (
        "format JSON Lines",
        "files 1: a.jsonl",
        "samples 2",
        "text varies str 5 in the first",
        "n [] int32 4",
        "ids varies int32 8 in the first, [2]",
    ):
        assert expected in output
    index = tmp_path / ".a.jsonl.filled-lines.index"
    assert f"index {index} ({index.stat().st_size} bytes)" in output.replace("\n", "")


def test_it_shows_urls_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAIDAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("line\n")
    code, output = run(tmp_path / "*.txt")
    assert (code, "files 2: 0.txt, 1.txt" in output) == (0, True)
    with serving({"a.txt": b"one\ntwo\n"}) as server:
        code, output = run(f"{server.url}/a.txt")
    assert (code, "samples 2" in output) == (0, True)
    assert "text varies str 3 in the first" in output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.npz"], 1, "missing.npz: there is no such file"),
        (["x.npz", "--mesh", "data=4", "--batch-size", "6"], 1, "error: "),
        (["x.npz", "--mesh", "data=4", "--spec", "model", "--batch-size", "8"], 1, "model"),
        (["x.npz", "--mesh", "data"], 2, "expected different axes"),
        ([], 2, "Missing argument"),
    ],
)
def test_wrong_input_is_named_without_a_traceback(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("x.npz", x=np.zeros((16, 6), np.float32))
    exit_code, output = run(*arguments)
    assert exit_code == code
    assert message in output
    assert "Traceback" not in output
