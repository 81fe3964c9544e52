import pytest

from braidax.checkpoint import Every
from braidax.errors import ArgumentError


def test_every_is_due_at_its_multiples() -> None:
    assert [n for n in range(1, 10) if Every(3).due(n)] == [3, 6, 9]
    assert all(Every(1).due(n) for n in range(1, 5))


@pytest.mark.parametrize("num_updates", [0, -1])
def test_every_refuses_what_is_never_due(num_updates: int) -> None:
    with pytest.raises(ArgumentError, match=rf"num_updates={num_updates}: expected a whole number >= 1"):
        Every(num_updates)
