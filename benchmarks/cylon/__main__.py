"""Frames on one host: join, group-by, sort and their pipeline, TPC-H, and the questions of h2o.ai.

Ours on 1, 2 and 4 ranks, on local processes and on workers of Dask and Ray, beside Polars (one process), DuckDB,
pandas, Dask, Ray Data, Daft (alone and on Ray) and Sail. All use the same cores, read the same files, and have given
the same values before they are timed. Each system has a process of its own; Ray's and Dask's are stopped between turns.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.cylon import cases
from benchmarks.cylon.cases import FULL, QUICK, QUICK_CASES, Scale
from benchmarks.cylon.measuring import Bench
from benchmarks.harness import Report, arguments, run, say
from benchmarks.harness.machine import num_cores

NUM_CORES = 2  # the claims' machine
CASES: Mapping[str, Callable[[Bench, Scale], None]] = {
    "pipeline": cases.pipeline,
    "parquet": cases.parquet,
    "gangs": cases.gangs,
    "operations": cases.operations,
    "tpch": cases.tpch,
    "tpch_memory": cases.tpch_memory,
    "questions": cases.questions,
    "start": cases.start,
    "big": cases.big,
}

LONG = ("tpch_memory", "big")


def main() -> int:
    parser = arguments("cylon", __doc__ or "", list(CASES))
    parser.add_argument("--frames", metavar="PYTHON", help="of an environment with the peers and tpchgen-cli")
    parser.add_argument(
        "--data", metavar="FOLDER", type=Path, help="keep the tables here; by default below the temporary folder"
    )
    parser.add_argument(
        "--rows", metavar="N", type=int, help="of the pipeline's tables, instead of those of the claims"
    )
    parser.add_argument("--scale", metavar="SF", type=float, help="the factor of TPC-H, 1 by default")
    parser.add_argument("--cores", metavar="N", type=int, default=min(NUM_CORES, num_cores()), help="that each may use")
    parser.add_argument(
        "--big", action="store_true", help="also tables of 50 M rows, TPC-H in memory, and of factor 10"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a limit of time ends the systems, too
    scale = QUICK if options.quick else FULL
    scale = replace(scale, rows=options.rows or scale.rows, tpch=options.scale or scale.tpch)
    report = Report(options, "polars", "pyarrow")
    peers = os.path.abspath(options.frames) if options.frames else None  # noqa: PTH100  (a link to Python stays one)
    cases_of = QUICK_CASES if options.quick else {}
    bench = Bench(report, _folder(options.data), peers, _generator(peers), options.cores, cases_of)
    report.note("inputs are in memory or, from Parquet, in the page cache: no disk is measured")
    for name in options.only or [name for name in CASES if options.big or name not in LONG]:
        say(f"{name} …")
        CASES[name](bench, scale)
    if not options.only and not options.big:
        cases.without_big(bench)
    return report.finish()


def _folder(chosen: Path | None) -> Path:
    """Returns where tables are kept, which nobody else may have made."""
    folder = chosen or Path(tempfile.gettempdir()) / f"braidax-benchmarks-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if chosen is None and folder.stat().st_uid != os.getuid():
        raise SystemExit(f"{folder} belongs to somebody else: name another folder with --data")
    return folder.resolve()


def _generator(peers: str | None) -> str:
    """Returns `tpchgen-cli`, the one beside the peers' Python first, "" without one."""
    beside = f"{Path(peers).parent}{os.pathsep}" if peers else ""
    return shutil.which("tpchgen-cli", path=f"{beside}{os.environ.get('PATH', '')}") or ""


if __name__ == "__main__":
    run(main)
