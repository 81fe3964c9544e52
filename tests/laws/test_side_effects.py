"""No side effects on import: quiet, quick, and nothing loaded that is not used."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tree import SRC, modules

MAX_MODULES = 650  # beyond those of JAX; from compiled files each takes about half a millisecond
FOREIGN = {"absl", "jax", "jaxtyping", "numpy", "optax", "xxhash"}  # what `import braidax` loads that is installed
IMAGES = {"cv2", "numba", "PIL", "simplejpeg"}
TABLES = {
    "array_record",
    "datasets",
    "google",
    "huggingface_hub",
    "msgspec",
    "obstore",
    "pandas",
    "polars",
    "pyarrow",
    "tokenizers",
}
CLUSTERS = {"dask", "ray", "ucp"}
MODELS = {"equinox", "flax", "sklearn", "torch"}
REPORTS = {"matplotlib", "rich", "tensorboard", "tensorboardX", "typer"}
NOT_LOADED = IMAGES | TABLES | CLUSTERS | MODELS | REPORTS

# Runs in a fresh interpreter, so that nothing the tests have loaded counts.
OBSERVE = """
import json, os, sys, threading
import jax
from jax._src import xla_bridge
FOREIGN = {"_RJEM_MALLOC_CONF": ""}  # Polars tells its allocator
config, environment, threads = dict(jax.config.values), dict(os.environ), threading.active_count()
before = set(sys.modules)
for name in sys.argv[1:]:
    __import__(name)
    for shown in getattr(sys.modules[name], "__all__", ()):  # what is imported at its first use, too
        getattr(sys.modules[name], shown)
with open("seen.json", "w") as file:
    json.dump({
        "modules": sorted(sys.modules),
        "loaded": sorted(set(sys.modules) - before),
        "threads": threading.active_count() - threads,
        "backend": xla_bridge.backends_are_initialized(),
        "config": [key for key, value in jax.config.values.items() if config.get(key) != value],
        "environment": {**os.environ, **FOREIGN} != {**environment, **FOREIGN},
    }, file)
"""


def observe(folder: Path, *names: str, path: Path = SRC, **variables: str) -> dict[str, Any]:
    """Imports modules in a fresh interpreter and returns what that did, what it printed and the files it left."""
    environment = {**os.environ, "PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, "-W", "error", "-c", OBSERVE, *names]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    seen = folder / "seen.json"
    facts: dict[str, Any] = json.loads(seen.read_text())
    seen.unlink()
    return {**facts, "printed": result.stdout + result.stderr, "files": sorted(item.name for item in folder.iterdir())}


def effects(facts: dict[str, Any]) -> list[str]:
    """Returns the names of the effects that there should not be."""
    return [name for name in ("threads", "backend", "config", "environment", "printed", "files") if facts[name]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `import braidax` does."""
    return observe(tmp_path_factory.mktemp("alone"), "braidax")


def test_import_braidax_has_no_side_effects_and_loads_no_extra(alone: dict[str, Any]) -> None:
    assert effects(alone) == []
    assert NOT_LOADED & set(alone["modules"]) == set()


def test_no_module_has_side_effects(tmp_path: Path) -> None:
    names = [module.name for module in modules() if not module.name.endswith("__main__")]
    assert effects(observe(tmp_path, *names)) == []


def test_ranks_do_not_wait_for_jax(tmp_path: Path) -> None:
    code = "import sys, braidax, braidax.comm, braidax.gang.child; print('jax' in sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(
        command,
        cwd=SRC,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert result.stdout == "False\n"


def test_import_braidax_is_quick(alone: dict[str, Any]) -> None:
    # What takes the time is counted, not timed: a busy machine makes every import slow.
    own = [name for name in alone["loaded"] if name.split(".")[0] not in sys.stdlib_module_names]
    assert {name.split(".")[0] for name in own} - {"braidax"} <= FOREIGN
    assert 0 < len(alone["loaded"]) <= MAX_MODULES


EFFECTS = {
    "threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "backend": "import jax\njax.devices()",
    "config": "import jax\njax.config.update('jax_enable_x64', True)",
    "environment": "import os\nos.environ['BRAIDAX'] = '1'",
    "printed": "print('hello')",
    "files": "open('left', 'w').close()",
}


def test_every_side_effect_is_found(tmp_path: Path) -> None:
    package, folder = tmp_path / "package", tmp_path / "folder"
    package.mkdir()
    folder.mkdir()
    for effect, code in EFFECTS.items():
        (package / f"loud_{effect}.py").write_text(code)
    assert effects(observe(folder, *(f"loud_{effect}" for effect in EFFECTS), path=package)) == list(EFFECTS)


def test_a_side_effect_is_found_alone(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "loud.py").write_text(EFFECTS["environment"])
    (tmp_path / "folder").mkdir()
    assert effects(observe(tmp_path / "folder", "loud", path=tmp_path / "package")) == ["environment"]
