"""Pictures of the pages are what their scripts draw."""

import runpy
from typing import Any

import pytest

from tests.support.tree import ROOT

DOCS = ROOT / "docs"
SCRIPTS = {name: runpy.run_path(str(DOCS / f"{name}.py")) for name in ("batch_on_mesh", "pictures", "ring")}
DRAWN: dict[str, Any] = {
    "batch_on_mesh.svg": SCRIPTS["batch_on_mesh"]["draw"],
    "ring.svg": SCRIPTS["ring"]["draw"],
    **SCRIPTS["pictures"]["PICTURES"],
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    assert DRAWN[name]() == (DOCS / name).read_text(), "run the script beside it"


def test_every_picture_has_a_script() -> None:
    assert {path.name for path in DOCS.glob("*.svg")} == set(DRAWN)
