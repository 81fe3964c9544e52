"""The seed's figures 3-6: our loader against a naive loop, on CIFAR-100 at 224 x 224 and MNIST at 30 x 30.

The loops hold the unpickled data set in memory and resize image by image, with Pillow or OpenCV, in as many threads as
ours, two batches ahead. They hand over to flax's `prefetch_to_device`, as the seed's do, or by `jax.device_put` with
the shardings that the step wants. All sides deliver uint8 batches of equal shape, split over the devices, globally
shuffled, by bilinear interpolation; the largest difference of a pixel is measured.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from benchmarks.harness import Report, arguments, run, say
from benchmarks.naive import loading
from benchmarks.naive.archives import write_cifar100, write_mnist
from benchmarks.naive.permuting import permute
from benchmarks.naive.plot import draw
from benchmarks.naive.scale import FULL, QUICK, Scale
from benchmarks.naive.training import training

CASES: Mapping[str, Callable[[Report, Scale, Mapping[str, Path]], None]] = {
    "loader": loading.throughput,
    "threads": loading.threads,
    "spread": loading.spread,
    "stall": loading.stall,
    "training": training,
    "permute": permute,
}


def main() -> int:
    parser = arguments("naive", __doc__ or "", tuple(CASES))
    parser.add_argument("--plot", metavar="FILE", help="draw runtime per sample to FILE (.png or .svg)")
    parser.add_argument("--archives", metavar="FOLDER", help="keep the generated archives here and use them again")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    scale = QUICK if options.quick else FULL
    report = Report(options, "flax", "pillow", "opencv-python-headless")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.archives or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        paths = _archives(folder, scale)
        for name in options.only or CASES:
            say(f"{name} …")
            CASES[name](report, scale, paths)
    if options.plot:
        draw(report.rows, Path(options.plot))
    return report.finish()


def _archives(folder: Path, scale: Scale) -> dict[str, Path]:
    cifar, mnist = folder / "cifar-100-python.tar.gz", folder / "mnist"
    if not cifar.exists():
        write_cifar100(folder, num_train=scale.num_train, num_test=100)
    if not mnist.exists():
        write_mnist(folder, num_train=scale.num_train, num_test=100)
    return {"cifar100@224": cifar, "mnist@30": mnist}


if __name__ == "__main__":
    run(main)
