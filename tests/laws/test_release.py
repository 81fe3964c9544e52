"""The release: version, changelog, matrix, bounds and workflows say the same, and the description holds on an index."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import braidax
from braidax.bindings import BINDINGS
from tests.support.tree import ROOT, SRC

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MATRIX = re.search(
    r"^## What was verified$(.*?)^## ", (ROOT / "docs" / "limits.md").read_text(), re.DOTALL | re.MULTILINE
)
HOST = "https://example.org/owner/braidax"


def newest(changelog: str) -> tuple[str, str]:
    """Returns the newest version of a changelog that is not *Unreleased*, and its date."""
    found = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert found is not None
    return found[1], found[2]


def bounds(name: str) -> dict[str, str]:
    """Returns the bounds of a requirement, such as `{">=": "0.10.2", "<": "0.11"}`."""
    (line,) = (line for line in PROJECT["dependencies"] if re.match(rf"{name}\b", line))
    return dict(re.findall(r"(>=|<)([\d.]+)", line))


def test_the_version_is_the_newest_of_the_changelog_and_the_one_of_the_matrix() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert newest(changelog)[0] == braidax.__version__
    released = changelog.split(f"## [{braidax.__version__}]")[1]
    assert released.index("### Upgrading") < released.index("### Added")
    assert MATRIX is not None
    assert f"Of version {braidax.__version__}," in MATRIX[1]


def test_the_pythons_of_the_matrix_are_those_of_the_classifiers_and_of_the_workflow() -> None:
    assert MATRIX is not None
    listed = set(re.findall(r"\b3\.\d+\b", " ".join(re.findall(r"^\| (Python .*?) \|", MATRIX[1], re.MULTILINE))))
    assert listed == {
        version for line in PROJECT["classifiers"] for version in re.findall(r"Python :: (3\.\d+)$", line)
    }
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert listed == set(re.findall(r"3\.\d+", workflow.split("python: [")[1].split("]")[0]))
    assert PROJECT["requires-python"] == f">={min(listed)}"


def test_the_bounds_of_jax_are_those_of_the_matrix_and_of_the_check() -> None:
    jax = bounds("jax")
    assert MATRIX is not None
    assert re.search(rf"^\| JAX {re.escape(jax['>='])} \| all of it \|", MATRIX[1], re.MULTILINE)
    assert re.search(rf"^\| JAX {re.escape(jax['<'])} \| pip takes none", MATRIX[1], re.MULTILINE)
    code = "import jax; jax.__version_info__ = (0, 9, 2); import braidax; braidax.parallelize"
    said = error_of(code)
    floor = jax[">="]
    assert f"MissingExtra: braidax needs JAX {floor} or newer, and 0.9.2 is installed" in said
    assert f'pip install --upgrade "jax>={floor}"' in said
    assert f'pip install --upgrade "jax>={floor}"' in (ROOT / "docs" / "install.md").read_text()


def test_windows_is_refused_before_anything_is_imported() -> None:
    said = error_of("import sys; sys.platform = 'win32'; import braidax")
    assert "MissingExtra: braidax does not run on Windows: it locks files by the module 'fcntl'" in said
    assert "Windows Subsystem for Linux" in said


def error_of(code: str) -> str:
    """Returns the last line of the traceback of a program."""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    return result.stderr.splitlines()[-1]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns hatch_metadata.py, loaded without hatchling."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_metadata", ROOT / "hatch_metadata.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_link_of_the_description_is_relative(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = hooks.DescriptionHook()
    hook.root = str(ROOT)
    for repository, links in ((HOST, 40), ("", 0)):
        monkeypatch.setenv("BRAIDAX_REPOSITORY", repository)
        metadata: dict[str, Any] = {}
        hook.update(metadata)
        text = metadata["readme"]["text"]
        targets = re.findall(r"\]\(([^)]*)\)", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
        assert [target for target in targets if not target.startswith("https://")] == []
        assert len(targets) >= links
        assert len(metadata["urls"]) == (4 if repository else 0)
        assert text.count("```") == (ROOT / "README.md").read_text().count("```")


def test_links_lead_to_the_tag_or_become_words(hooks: Any) -> None:
    text = "[`a` b](docs/a.md#c) [web](https://x.org) [here](#c)\n```\n[no](link)\n```\n[d](d.md)\n"
    tag = f"{HOST}/blob/v1.2.3"
    code = "```\n[no](link)\n```"
    assert hooks.described(text, HOST, "1.2.3") == (
        f"[`a` b]({tag}/docs/a.md#c) [web](https://x.org) here\n{code}\n[d]({tag}/d.md)\n"
    )
    assert hooks.described(text, None, "1.2.3") == f"`a` b [web](https://x.org) here\n{code}\nd\n"
    with pytest.raises(ValueError, match="BRAIDAX_REPOSITORY='owner/braidax': expected a URL such as https://"):
        hooks.checked("owner/braidax")


def test_the_bindings_that_are_built_are_those_that_are_told() -> None:
    sources = re.findall(r'"([a-z_/]+_binding)\.c"', (ROOT / "hatch_build.py").read_text())
    assert sorted(source.replace("/", ".") for source in sources) == sorted(BINDINGS.values())
    assert sorted(BINDINGS.values()) == sorted(
        ".".join(path.relative_to(SRC / "braidax").with_suffix("").parts) for path in SRC.rglob("*_binding.c")
    )


def test_a_version_of_a_changelog_is_found() -> None:
    text = "## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n## [1.1.0] - 2025-01-31\n"
    assert newest(text) == ("1.2.0", "2026-01-31")
    assert bounds("jaxtyping") == {">=": "0.3.7"}


def test_a_wheel_is_used_as_the_tests_of_the_workflow_use_it() -> None:
    text = (ROOT / ".ci" / "use_wheel.py").read_text()
    assert f"compiled: {', '.join(BINDINGS)}\\n" in text
    assert Path(ROOT / ".github" / "workflows" / "wheels.yml").read_text().count("use_wheel.py ") == 2


def test_workflows_call_what_there_is_and_every_job_has_a_limit() -> None:
    folder = ROOT / ".github"
    targets = set(re.findall(r"^([a-z]+)(?: [a-z]+)*:(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (folder / "workflows").glob("*.yml"):
        text = path.read_text()
        named = re.findall(r"(?:make |target: \[?)([a-z]+)", text)
        assert set(named) <= targets, path.name
        assert text.count("runs-on:") == text.count("timeout-minutes:"), path.name
        assert [script for script in re.findall(r"\.ci/[\w.]+", text) if not (ROOT / script).exists()] == []
        assert all((ROOT / action).exists() for action in re.findall(r"uses: \./(\S+)", text)), path.name
    assert {"nightly", "lowest", "newest", "smoke", "test", "docs"} <= targets
