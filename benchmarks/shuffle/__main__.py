"""RINAS' question, asked of today's loaders: what does a global shuffle cost?

Records of 512 tokens (warm, cold, in an object store), texts of varying length, photographs of 500 x 375 pixels as
224 x 224, and two small models end to end against peers that fetch ahead and serial ordered fetching.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks.harness import Report, arguments, run, say
from benchmarks.harness.machine import num_cores
from benchmarks.shuffle.cases import Bench, Scale
from benchmarks.shuffle.end_to_end import training
from benchmarks.shuffle.for_torch import for_torch
from benchmarks.shuffle.in_memory import small, texts, tokens
from benchmarks.shuffle.limits import limits, why
from benchmarks.shuffle.photos import photos
from benchmarks.shuffle.slow_storage import cold, late, remote

FULL = Scale(500_000, 100_000, 1_200, rounds=5, seconds=1.0, grain_threads=(16, 64), workers=(0, num_cores()))
QUICK = Scale(20_000, 4_000, 100, rounds=1, seconds=0.2, grain_threads=(16,), workers=(0,))

CASES: dict[str, Callable[[Bench], None]] = {
    "tokens": tokens,
    "small": small,
    "texts": texts,
    "torch": for_torch,
    "photos": photos,
    "cold": cold,
    "remote": remote,
    "late": late,
    "training": training,
    "why": why,
    "limits": limits,
}


def main() -> int:
    parser = arguments("shuffle", __doc__ or "", list(CASES))
    parser.add_argument("--inputs", metavar="FOLDER", help="keep the generated inputs here and use them again")
    parser.add_argument("--streaming", metavar="PYTHON", help="of an environment with mosaicml-streaming, as a peer")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    report = Report(options, "datasets", "torch", "grain", "tensorflow-cpu", "obstore", "pillow")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.inputs or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(report, QUICK if options.quick else FULL, folder, options.streaming)
        for name in options.only or CASES:
            say(f"{name} …")
            CASES[name](bench)
    return report.finish()


if __name__ == "__main__":
    run(main)
