"""What needs no peer: why a shuffle is global, memory over an epoch, and the start of a source of 10^9 records."""

import numpy as np

from benchmarks.shuffle import alone, inputs, training
from benchmarks.shuffle.cases import Bench
from braidax.data import Permutation


def why(bench: Bench) -> None:
    """The loss after one epoch over samples that lie sorted by class."""
    rng, num_samples = np.random.default_rng(0), 20_000
    labels = np.repeat(np.arange(10), num_samples // 10)
    centers = rng.normal(size=(10, 32))
    samples = (centers[labels] + rng.normal(size=(num_samples, 32))).astype(np.float32)
    orders = {
        "global shuffle": Permutation(num_samples, seed=0, epoch=0)(np.arange(num_samples)),
        "buffer of 1,000": training.buffered_order(num_samples, 1000),
    }
    for name, order in orders.items():
        loss = training.final_loss(order, samples, labels, batch_size=64)
        bench.report.add("sorted by class", name, "loss", "nats", [loss])


def limits(bench: Bench) -> None:
    """Memory, and the start."""
    report = bench.report
    early, late = alone.memory(inputs.write_tokens(bench.folder, bench.scale.num_tokens), 512)
    report.add("memory over an epoch of tokens", "braidax, npy", "resident after 5 %", "MiB", [early / 2**20])
    report.add("memory over an epoch of tokens", "braidax, npy", "resident at the end", "MiB", [late / 2**20])
    report.at_most("rss", late / early, 1.05)
    seconds, num_bytes = alone.start_of_a_billion(bench.folder)
    report.add("10^9 records", "braidax", "to the first batch", "s", [seconds])
    report.add("10^9 records", "braidax", "memory", "MiB", [num_bytes / 2**20])
    report.at_most("start_1e9", max(seconds / 1.0, num_bytes / 50e6), 1)
