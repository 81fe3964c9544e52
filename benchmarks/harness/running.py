"""How every benchmark is called, and how it ends."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

RESULTS = Path(__file__).resolve().parents[1] / "results"
FALLEN = 3  # the exit status where a claim does not hold; 1 is a crash
STOPPED = 130  # as a shell says of what SIGINT has ended


def arguments(benchmark: str, description: str, cases: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Returns the parser of what every benchmark understands.

    **Arguments:** `benchmark`: its name, `NAME` of `python -m benchmarks.NAME`. `cases`: that `--only` chooses from.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}", description=description)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, under a minute: fails on a crash only; figures mean nothing"
    )
    parser.add_argument("--only", metavar="CASE", nargs="+", choices=cases or None, help="some of: %(choices)s")
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        type=Path,
        const=RESULTS / f"{benchmark}.json",
        help="write all figures to FILE, by default where the page is made from",
    )
    parser.set_defaults(benchmark=benchmark)
    return parser


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a benchmark and exits with its status; of one that is stopped it says so."""
    try:
        status = main()
    except KeyboardInterrupt:
        say("stopped by Ctrl-C before the end: nothing is saved, and nothing half-written")
        status = STOPPED
    except BrokenPipeError:  # of `| head`
        status = 0
    sys.exit(status)


def say(line: str) -> None:
    """Tells how far it is."""
    print(line, file=sys.stderr, flush=True)
