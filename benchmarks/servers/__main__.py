"""Tables on servers: what a server computes beside FBGEMM, and steps beside tables on devices and whole gradients.

All processes share the cores of one machine. "links" gives each that trains a host of its own, a network namespace, and
its link a bandwidth; it needs Linux, root and iproute2. "disk" holds a process to a limit of memory by a control group,
and keeps its files in the current folder.
"""

from pathlib import Path

from benchmarks.harness import Report, arguments, models, run, say
from benchmarks.servers.applying import apply_case
from benchmarks.servers.delta import delta_case
from benchmarks.servers.disk import BY_FREQUENCY, disk_case
from benchmarks.servers.disk_steps import disk_steps_case
from benchmarks.servers.linked import image_cases, linked_cases
from benchmarks.servers.paces import paces_case
from benchmarks.servers.plot import draw
from benchmarks.servers.recovering import recover_case
from benchmarks.servers.resizing import resize_case
from benchmarks.servers.steps import parts_case, step_case

CASES = ("apply", "step", "links", "images", "paces", "recover", "resize", "disk", "delta")


def main() -> int:
    """Measures, and returns the exit status."""
    parser = arguments("servers", __doc__ or "", CASES)
    parser.add_argument("--fbgemm", metavar="PYTHON", help="of an environment with fbgemm-gpu-cpu")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw Parallax' chart to FILE (.png or .svg)")
    options = parser.parse_args()
    wanted, quick = options.only or CASES, options.quick
    if options.plot and not {"links", "images"} <= {*wanted}:
        parser.error("--plot draws the cases links and images, which are not among those that run")
    counted: dict[str, tuple[str, str, int]] = {}
    report = Report(options)
    if "apply" in wanted:
        say("apply")
        sizes = (4_096,) if quick else (4_096, 32_768, 262_144)
        apply_case(
            report, options.fbgemm, num_rows=100_000 if quick else 4_000_000, sizes=sizes, rounds=3 if quick else 15
        )
    if "step" in wanted:
        say("step")
        model = models.lm1b(20_000, 32, 64) if quick else models.lm1b(793_470, 128, 512)
        step_case(report, model, num_servers=1 if quick else 2, rounds=2 if quick else 6)
        parts_case(report, model, sizes=(1, 2) if quick else (1, 2, 4), rounds=2 if quick else 6)
    if "links" in wanted:
        counted |= linked_cases(report, quick=quick)
    if "images" in wanted:
        counted |= image_cases(report, quick=quick)
    if "paces" in wanted:
        say("paces")
        paces_case(report, seconds=1 if quick else 12, step_seconds=0.1, rounds=1 if quick else 3)
    if "recover" in wanted:
        say("recover")
        rows = 50_000 if quick else 4_000_000
        recover_case(report, num_rows=rows, width=32, rounds=1 if quick else 5)
    if "resize" in wanted:
        say("resize")
        rows = 50_000 if quick else 4_000_000
        resize_case(report, num_rows=rows, width=32, rounds=1 if quick else 3)
    if "disk" in wanted:
        say("disk")
        if quick:
            disk_case(report, Path.cwd(), limit_bytes=256 << 20, size=4_096, rounds=2, orders=(BY_FREQUENCY,))
            model = models.lm1b(500_000, 64, 64)
            sizes = {"num_rows": 3 * 500_000, "limit_bytes": 512 << 20}
            disk_steps_case(report, Path.cwd(), model, **sizes, warm=4, count=4, rounds=2)
        else:
            disk_case(report, Path.cwd(), limit_bytes=1 << 30, size=32_768, rounds=12)
            model = models.lm1b(8_388_608, 64, 512)  # two tables, 4 GiB of values
            sizes = {"num_rows": 3 * 8_388_608, "limit_bytes": 1 << 30}
            disk_steps_case(report, Path.cwd(), model, **sizes, warm=80, count=12, rounds=6)
    if "delta" in wanted:
        say("delta")
        num_rows, size = (10_000, 2_048) if quick else (1_000_000, 32_768)
        delta_case(report, num_rows=num_rows, size=size, widths=(32, 64))
    if options.plot and counted:
        draw(report.rows, counted, options.plot)
    return report.finish()


if __name__ == "__main__":
    run(main)
