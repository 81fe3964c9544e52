"""The page of what studies have found: its tables are those of the results, and its reports lead to what is there."""

import json
import re
import runpy
from typing import Any
from urllib.parse import unquote

import pytest

from tests.support.tree import ROOT

STUDIES = ROOT / "docs" / "studies"
TABLES: dict[str, Any] = runpy.run_path(str(STUDIES / "tables.py"))


def test_tables_are_those_of_the_results() -> None:
    page = STUDIES.with_suffix(".md").read_text()
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(TABLES["TABLES"])
    assert TABLES["written"](page) == page, "run python docs/studies/tables.py"


@pytest.mark.parametrize("case", TABLES["CASES"])
def test_reports_lead_to_traces_that_are_there(case: str) -> None:
    folder = STUDIES / case
    linked = {unquote(path) for path in re.findall(r'href="([^"#]+)"', (folder / "report.html").read_text())}
    named = {one["trace"] for one in json.loads((folder / "results.json").read_text())["settings"]}
    assert linked == named == {f"traces/{path.name}" for path in (folder / "traces").iterdir()}
