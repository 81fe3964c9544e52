"""The fixtures and hooks of `tests/conftest.py`: a leaked thread fails, and in CI a skip fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support.data.formats.reading import assert_equal
from tests.support.suite_time import NOISE
from tests.support.tree import ROOT

SKIPS = {
    "test_one.py": "import pytest\ndef test_it():\n    pytest.skip('no server')\n",
    "test_two.py": "import pytest\npytest.importorskip('module_that_is_not_there')\n",
    "test_three.py": "import pytest\n@pytest.mark.skipif(True, reason='no server')\ndef test_it(): ...\n",
    "test_four.py": "import pytest\n@pytest.mark.xfail\ndef test_it():\n    assert False\n",
    "test_five.py": "import pytest\n@pytest.mark.slow\ndef test_it(): ...\n",
}
LEAK = """
import threading
import pytest
stop = threading.Event()
@pytest.mark.parametrize("options", [dict(daemon=False), dict(daemon=True, name="braidax-read"), dict(daemon=True)])
def test_it(options):
    threading.Thread(target=stop.wait, args=(1,), **options).start()
"""


def run_pytest(folder: Path, *, ci: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs pytest on a folder with our conftest and configuration."""
    text = (ROOT / "tests" / "conftest.py").read_text().replace("THREAD_SECONDS = 10.0", "THREAD_SECONDS = 0.1")
    (folder / "conftest.py").write_text(text)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "."],
        cwd=folder,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def closing_line(folder: Path, *, ci: str, options: tuple[str, ...] = ()) -> str:
    """Runs it, and returns its closing line."""
    return run_pytest(folder, ci=ci, options=options).stdout.strip().splitlines()[-1].partition(" in ")[0]


@pytest.fixture
def skips(tmp_path: Path) -> Path:
    """A folder whose tests skip in every way there is."""
    for name, text in SKIPS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_on_the_machine_of_a_user_a_skip_is_a_skip_and_a_leaked_thread_an_error(skips: Path) -> None:
    (skips / "test_leak.py").write_text(LEAK)
    assert closing_line(skips, ci="") == "3 passed, 3 skipped, 1 deselected, 1 xfailed, 2 errors"


def test_in_ci_a_skip_is_a_failure(skips: Path) -> None:
    every = ("--continue-on-collection-errors",)
    assert closing_line(skips, ci="true", options=every) == "1 failed, 1 deselected, 1 xfailed, 2 errors"


def test_what_tests_share_says_what_it_compared() -> None:
    with pytest.raises(AssertionError, match=r"assert PyTreeDef\({'a': \*}\) == PyTreeDef\({'b': \*}\)"):
        assert_equal({"a": np.zeros(1)}, {"b": np.zeros(1)})


def test_there_are_8_devices() -> None:
    assert jax.device_count("cpu") == 8


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), ("-n", "1")])  # CI has several processes
def test_in_ci_a_folder_that_takes_too_long_fails_the_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    folder = tmp_path / "tests" / "without_a_budget"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text("def test_it(): ...\n")
    done = run_pytest(tmp_path, ci="true", options=options)
    assert (done.returncode, "1 passed" in done.stdout) == (1, True), done.stdout
    assert f"tests/without_a_budget took 0 s: at most {NOISE:g} times its budget of 0 s" in done.stdout


@pytest.mark.slow  # a folder without a budget is found above, where it does not fail either
def test_elsewhere_a_folder_that_takes_too_long_fails_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "without_a_budget"
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text("def test_it(): ...\n")
    assert run_pytest(tmp_path, ci="").returncode == 0
