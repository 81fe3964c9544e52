"""`plans`: how long it takes to rank all candidates for 4,096 devices, on one core."""

import time

from benchmarks.harness import Report
from braidax.parallel import Link
from braidax.tune import Cluster
from braidax.tune.search.candidates import candidates
from braidax.tune.search.ranking import rank
from braidax.tune.search.roles import Offered
from braidax.tune.search.workload import Workload

PLANS = "plans: candidates for 4,096 devices"
_AXES = ("pod", "replica", "data", "model")
_LEAST, _MOST_STAGES = 100_000, 64


def measure_plans(report: Report, *, quick: bool) -> None:
    """Ranks more than 10⁵ candidates several times, and claims the time for 10⁵ of them at most."""
    cluster = Cluster(4096, 400e12, Link(100e9, 5e-6), Link(10e9, 2e-5), devices_per_host=8, memory_bytes=80 << 30)
    work = Workload(
        1e18, 1e11, 2e11, 1e13, 1e12, 200, table_bytes=2e10, row_bytes=1e9, cut_bytes=1e9, most_stages=_MOST_STAGES
    )
    taken, counts = list[float](), set[int]()
    for _ in range(1 if quick else 5):
        start = time.process_time()
        many = candidates(cluster.devices, 1 << 16, _AXES, offered=Offered(tables=True, most_stages=_MOST_STAGES))
        rank(many, work, cluster)
        taken.append(time.process_time() - start)
        counts.add(len(many.sizes))
    if min(counts) < _LEAST:
        raise AssertionError(f"{min(counts)} candidates, expected {_LEAST} or more")
    report.add(PLANS, f"{min(counts):,} candidates", "made and ranked, CPU seconds", "s", taken)
    report.at_most("plans", taken, 10)
