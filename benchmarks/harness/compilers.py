"""Compilers of machines that are not here."""

import sys
from importlib.util import find_spec
from pathlib import Path

import jax

H100, V5E = "h100:8", "v5e:2x4"
_BESIDE = Path(__file__).resolve().parents[2] / ".venv" / "aot"
_NEEDS = {"h100": "jax_plugins", "v5e": "libtpu"}


def why_absent(target: str) -> str:
    """Returns why nothing can be compiled for a target, "" if it can; its compiler may lie beside the environment."""
    jax.devices()  # JAX has begun without them: it would complain of what can only compile
    if _BESIDE.exists() and str(_BESIDE) not in sys.path:
        sys.path.append(str(_BESIDE))
    module = _NEEDS[target.partition(":")[0]]
    return "" if find_spec(module) else f"{module} is not installed: make .venv/stamp-bench installs it"
