"""How much is measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Full, or `--quick`.

    **Fields:** `seconds`: of one figure. `intervals`: between batches. `training`: batch size, devices, threads.
    """

    num_train: int
    rounds: int
    seconds: float
    batch_sizes: tuple[int, ...]
    device_counts: tuple[int, ...]
    thread_counts: tuple[int, ...]
    intervals: int
    training: tuple[tuple[int, int, int], ...]


FULL = Scale(
    num_train=50_000,
    rounds=5,
    seconds=0.6,
    batch_sizes=(64, 128, 256, 512),
    device_counts=(1, 4, 8),
    thread_counts=(1, 2, 4),
    intervals=200,
    training=((64, 1, 2), (64, 8, 1), (64, 8, 2), (64, 8, 4), (256, 8, 2)),
)
QUICK = Scale(
    num_train=1_500,
    rounds=1,
    seconds=0.02,
    batch_sizes=(64, 128),
    device_counts=(8,),
    thread_counts=(1, 2),
    intervals=8,
    training=((64, 8, 2),),
)
