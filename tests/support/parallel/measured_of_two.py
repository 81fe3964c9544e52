"""What each of two processes finds out of the devices that they share."""

import json
import sys
from dataclasses import astuple

import braidax.parallel as bx
from tests.support.parallel.models import make_mesh


def figures() -> list[float]:
    """Measures along two axes, of which one joins the processes."""
    machine = bx.measure_machine(make_mesh(), num_runs=1)
    links = (*machine.permutes.values(), *machine.collectives.values())
    return [machine.flops_per_second, *(value for link in links for value in astuple(link))]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(figures()) + "\n")
