"""What two processes train one behind the other, so that they begin and import once: `braidax launch --module
tests.support.parallel.several_of_two one_of_two "hybrid_of_two: two axes"` tells a line of each."""

import json
import sys

import pytest

from tests.support.gang.forks import fork_children
from tests.support.parallel import hybrid_of_two, one_of_two, served_of_two

CASES = {
    "one_of_two": one_of_two.losses,
    "hybrid_of_two": hybrid_of_two.numbers,
    "served_of_two": served_of_two.numbers,
}


def numbers(case: str) -> list[float]:
    """Trains. **Arguments:** `case`: a module and, where it has several cases, the name of one: `"module: name"`."""
    module, *names = case.split(": ")
    return CASES[module](*names)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        fork_children(patch, "optax", "braidax.parallel.served.on_servers.server", "scipy.linalg")
        for each in sys.argv[1:]:
            sys.stdout.write(json.dumps(numbers(each)) + "\n")
