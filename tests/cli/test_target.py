"""`braidax plan --target`: a task's step, compiled for a machine that is not here."""

import json
import re

import jax
import pytest
from typer.testing import CliRunner

from braidax.cli import app
from braidax.parallel import CompiledStep, Step
from braidax.program import CompiledProgram, Memory

DIGITS = ("plan", "digits", "--batch-size", "64")
NOTHING = CompiledProgram(Memory(0, 0, 0, 0), ())


def run(*arguments: str) -> tuple[int, str]:
    jax.devices()  # all that the tests have: a command would start as few as its mesh needs
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    return result.exit_code, result.output


@pytest.mark.slow
@pytest.mark.usefixtures("aot")
def test_memory_and_collectives_follow_the_plan() -> None:
    code, output = run("plan", "dlrm", "--preset", "tiny", "--target", "h100:4")
    assert code == 0, output
    plan, _, compiled = output.partition("\ncompiled for  h100:4: 4 × NVIDIA H100 80GB HBM3\n")
    assert plan.startswith("mesh          data=4 (Hybrid(touched=")
    assert " a device of 79.11 GiB: it fits\n" in compiled
    assert re.search(r"^gradients  all-to-all  4 ", compiled, re.MULTILINE)
    # Rows that find no room are sent in further rounds, of which nobody knows how many there are.
    assert "and more in loops of unknown length, in each turn\n" in compiled
    assert max(map(len, compiled.splitlines())) <= 120


@pytest.mark.usefixtures("aot")
def test_it_is_told_behind_the_plan_or_with_it_as_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_for(step: Step, target: str, *, coming: str) -> CompiledStep:
        return CompiledStep(target, "a device", step.mesh.size, 1000, {}, {"apply": NOTHING}, {"apply": 7})

    monkeypatch.setattr(Step, "compile_for", compile_for)
    code, output = run(*DIGITS, "--target", "h100:4")
    assert code == 0, output
    assert output.startswith("mesh          data=4 (Hybrid())\n")
    code, here = run(*DIGITS, "--target", "here", "--mesh", "data=2")
    assert (code, here.count("compiled for  here: 2 × a device\n")) == (0, 1), here
    assert "\n\ncompiled for  h100:4: 4 × a device\nmemory        7 B a device of 1000 B: it fits\n" in output
    code, output = run(*DIGITS, "--target", "h100:4", "--mesh", "data=2,model=2", "--json")
    assert code == 0, output
    told = json.loads(output)
    assert [axis["name"] for axis in told["plan"]["axes"]] == ["data", "model"]
    compiled = told["compiled"]
    assert [compiled[name] for name in ("target", "num_devices", "peak_bytes")] == ["h100:4", 4, 7]


@pytest.mark.usefixtures("aot")
def test_a_mesh_of_another_size_is_refused_first() -> None:
    code, output = run(*DIGITS, "--target", "h100:16", "--mesh", "data=8")
    assert code == 2
    assert "--mesh: it has 8 devices, and --target h100:16 has 16; give a mesh of 16" in " ".join(output.split())


def test_a_target_that_is_none() -> None:
    code, output = run(*DIGITS, "--target", "a100:8")
    assert code == 1
    assert "error: target is 'a100:8', expected a machine and its devices, such as h100:8" in output
