"""Peers that are not installed: they are named where their figures would stand."""

import importlib.util
from collections.abc import Mapping
from typing import TypeVar

from benchmarks.harness.report import Report

_System = TypeVar("_System")


def absent(module: str) -> str:
    """Returns why a peer cannot be measured, "" if its module is there."""
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        is_there = False
    return "" if is_there else f"not installed ({module})"


def installed(
    report: Report, case: str, running: Mapping[str, _System], needs: Mapping[str, str], *, at: str = ""
) -> dict[str, _System]:
    """Returns the systems that can run; of each other one the report says that it is not installed.

    **Arguments:** `running`: by name. `needs`: by name the module that a system imports, of those that need one.
    """
    found: dict[str, _System] = {}
    for name, system in running.items():
        if why := absent(needs[name]) if name in needs else "":
            report.missing(case, name, why, at=at)
        else:
            found[name] = system
    return found
