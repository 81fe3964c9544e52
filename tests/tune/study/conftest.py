"""Processes of studies, which begin with what they import: that takes longer than what they are asked for here."""

from collections.abc import Iterator

import pytest

from tests.support.gang.forks import fork_children


@pytest.fixture(scope="module", autouse=True)
def processes_are_forks() -> Iterator[None]:
    """Lets gangs and launched programs begin with what they import."""
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch, "braidax.tune.study.measuring", "tests.support.tune.study.tiny")
        yield
