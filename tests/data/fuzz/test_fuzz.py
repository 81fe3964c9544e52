"""Damaged files of every format: the right samples, or an error of ours that names the file; never anything else.

What is right says another reader of the format, where a file has no checksum that tells a damaged byte.
"""

from collections.abc import Iterator

import pytest

from tests.support.data.fuzz.cases import CASES
from tests.support.data.fuzz.trials import Trials

NUM_MUTATIONS = 300
QUICK_SHARE = 100  # every so many of them is tried in CI


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """A process that tries mutations, for all tests of this module."""
    found = Trials(tmp_path_factory.mktemp("fuzz"))
    yield found
    found.close()


@pytest.mark.parametrize("name", CASES)
def test_a_hundredth_of_the_damaged_files(trials: Trials, name: str) -> None:
    assert not trials.failures(name, range(0, NUM_MUTATIONS, QUICK_SHARE))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_damaged_files(trials: Trials, name: str) -> None:
    assert not trials.failures(name, [n for n in range(NUM_MUTATIONS) if n % QUICK_SHARE])
