"""The ranking: what fits, the fastest first; and what is the least where nothing fits."""

from typing import NamedTuple

import numpy as np

from braidax.errors import ArgumentError
from braidax.parallel.plan.costs.machine import in_time, scaled

from .candidates import Candidates
from .cluster import Cluster
from .predicting import Predicted, predict
from .roles import ROLES, UNUSED
from .workload import Workload


class Ranked(NamedTuple):
    """Candidates with what they take, and their order.

    **Fields:** `order`: places of those that fit, the fastest first. `num_refused`: those that do not fit. `headroom`:
    the share of predicted memory that had to be free beside it.
    """

    many: Candidates
    predicted: Predicted
    order: tuple[int, ...]
    num_refused: int
    headroom: float = 0.0

    def name(self, at: int) -> str:
        """Returns a candidate as `data=4 fully_sharded, model=2 rotated, microbatches=2`."""
        axes = zip(self.many.axes, self.many.sizes[at], self.many.kinds[at], strict=True)
        words = [f"{axis}={size} {ROLES[int(kind)].name}" for axis, size, kind in axes if kind != UNUSED] or [
            "one device"
        ]
        pieces = int(self.many.microbatches[at])
        return ", ".join([*words, *([f"microbatches={pieces}"] if pieces > 1 else [])])

    def told(self, at: int) -> tuple[str, str, str, str]:
        """Returns a candidate's name, seconds, memory and bytes sent, as a table has them."""
        seconds, memory, sent = (float(column[at]) for column in self.predicted)
        return self.name(at), in_time(seconds), scaled(memory, "B"), scaled(sent, "B")

    def why(self) -> str:
        """Says why the first one won."""
        if len(self.order) < 2:
            return "nothing else fits"
        first, second = self.order[:2]
        seconds, memory, sent = (column[second] / max(column[first], 1e-30) for column in self.predicted)
        told = f"{100 * (seconds - 1):.3g} % faster than {self.name(second)}"
        if sent >= 1.01:
            return (
                f"{told}: sends {sent:.3g} × fewer bytes" if self.predicted.sent_bytes[first] else f"{told}: sends none"
            )
        return f"{told}: with {1 / memory:.3g} × its memory" if memory <= 0.99 else told


HEADROOM = 0.75
"""As a share of predicted memory, what has to be free beside it where nobody compiles what was predicted.

Of 145 candidates of four small losses, 109 took within 15 % of what was predicted when they were compiled, and the
worst one, sharded and tensor parallel words, 1.6 times as much.
"""


def rank(many: Candidates, work: Workload, cluster: Cluster, *, headroom: float = 0.0) -> Ranked:
    """Ranks candidates by predicted seconds; of those as fast, what sends and holds less comes first.

    **Arguments:** `headroom`: the share of predicted memory that has to be free beside it for a candidate to fit.

    **Raises:** `ArgumentError` when none fits: the limit, by how much, and the candidate that is the nearest.
    """
    predicted = predict(many, work, cluster)
    fits, needs = np.ones(len(many.sizes), bool), predicted.memory_bytes * (1 + headroom)
    if cluster.memory_bytes is not None:
        fits = needs <= cluster.memory_bytes
    order = np.lexsort((predicted.memory_bytes, many.microbatches, predicted.sent_bytes, predicted.seconds))
    ranked = Ranked(many, predicted, tuple(order[fits[order]].tolist()), int((~fits).sum()), headroom)
    if not ranked.order:
        least = int(np.argmin(predicted.memory_bytes))
        needed, limit = float(needs[least]), float(cluster.memory_bytes or 0)
        told = f" ({100 * headroom:.3g} % more than is predicted, as nothing is compiled)" if headroom else ""
        raise ArgumentError(
            f"memory_bytes={cluster.memory_bytes}: it binds, all {len(order):,} candidates need more; the nearest, "
            f"{ranked.name(least)}, needs {int(needed):,}{told}, {needed / limit:.3g} × as much: give that, or more "
            "devices"
        )
    return ranked
