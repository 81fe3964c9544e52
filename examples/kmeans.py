"""K-means over several processes, with NumPy and the communicator alone: no JAX, no MPI, nothing to install.

braidax launch --processes 4 --initialize nothing examples/kmeans.py
braidax launch --processes 4 --initialize nothing --transport ucx examples/kmeans.py
"""

import numpy as np

from braidax.comm import Communicator, from_environment

NUM_POINTS, NUM_DIMS, NUM_CLUSTERS = 200_000, 8, 16


def points_of(rank: int, size: int) -> np.ndarray:
    """Makes this rank's share of the points: 16 clouds, the same ones whatever the number of ranks."""
    rng = np.random.default_rng(0)
    clouds = rng.integers(NUM_CLUSTERS, size=NUM_POINTS)
    points = 10 * rng.normal(size=(NUM_CLUSTERS, NUM_DIMS))[clouds] + rng.normal(size=(NUM_POINTS, NUM_DIMS))
    return points[rank::size]


def kmeans(comm: Communicator, points: np.ndarray, *, num_rounds: int = 50) -> tuple[np.ndarray, float]:
    """Lloyd's algorithm: every rank assigns its own points, and two sums are all that travels."""
    centers = comm.broadcast(spread(points) if comm.rank == 0 else b"")
    for _ in range(num_rounds):
        distances = ((points**2).sum(1)[:, None] - 2 * points @ centers.T) + (centers**2).sum(1)
        nearest = distances.argmin(1)
        sums = np.zeros((NUM_CLUSTERS, NUM_DIMS + 2))  # of coordinates, points, squared distances
        np.add.at(sums, nearest, np.column_stack([points, np.ones(len(points)), distances.min(1)]))
        sums = comm.all_reduce(sums)
        moved = sums[:, :NUM_DIMS] / np.maximum(sums[:, NUM_DIMS, None], 1)
        if np.allclose(moved, centers):
            break
        centers = moved
    return centers, float(sums[:, -1].sum() / sums[:, NUM_DIMS].sum())


def spread(points: np.ndarray) -> np.ndarray:
    """Chooses first centers that are far from one another."""
    chosen = [points[0]]
    while len(chosen) < NUM_CLUSTERS:
        distances = np.min([((points - center) ** 2).sum(1) for center in chosen], axis=0)
        chosen.append(points[distances.argmax()])
    return np.array(chosen)


if __name__ == "__main__":
    with from_environment() as comm:
        centers, spread_within = kmeans(comm, points_of(comm.rank, comm.size))
        if comm.rank == 0:
            print(f"{comm.size} ranks on {len(set(comm.hosts))} host(s): squared distance {spread_within:.3f}")
        comm.barrier()
