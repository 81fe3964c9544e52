"""A rank dies on Dask and on Ray: the frame is computed again on another worker, or in another actor."""

import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import distributed
import polars as pl
import pytest
import ray
from dask import config
from polars.testing import assert_frame_equal

import braidax.frame as bf
from braidax.gang import DaskGang, Gang, RayGang
from tests.support.frame.losing.dying import Dying
from tests.support.gang.ray_cluster import SETTINGS

# By JAX, where it runs already: Ray forks to start its processes, which then run another program.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")]

ROWS = 3000


@pytest.fixture
def on_dask() -> Iterator[Gang]:
    with (
        config.set({"distributed.deploy.lost-worker-timeout": "1h"}),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        DaskGang(client) as gang,
    ):
        yield gang


@pytest.fixture
def on_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    folder = tempfile.mkdtemp(prefix="braidax-", dir="/tmp")  # the names of Ray's sockets must not be long
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.delenv("RAY_AUTH_MODE")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    try:
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=200 << 20,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        with RayGang(2, num_cpus=0.5, timeout_seconds=200) as gang:
            yield gang
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def check(gang: Gang, folder: Path) -> None:
    """Loses a rank in a query, and one that keeps a part of a table."""
    table = pl.DataFrame({"k": [i % 70 for i in range(ROWS)], "v": [float(i) for i in range(ROWS)]})
    notes = folder / "notes"
    notes.mkdir()
    kept = bf.from_polars(table, gang).filter(pl.col("k") < 50).persist()
    dies = kept.map_batches(Dying(str(notes), ROWS - 30.0, 1), streamable=True)
    found = dies.group_by("k").agg(pl.col("v").sum()).sort("k").collect()
    expected = table.lazy().filter(pl.col("k") < 50).group_by("k").agg(pl.col("v").sum()).sort("k").collect()
    assert_frame_equal(found, expected)
    assert len(list(notes.iterdir())) == 1
    assert gang.lost == ()
    assert sum(kept.sink_arrow(folder / "out")) == table.filter(pl.col("k") < 50).height
    del kept, dies
    gc.collect()


def test_on_dask(on_dask: Gang, tmp_path: Path) -> None:
    check(on_dask, tmp_path)


def test_on_ray(on_ray: Gang, tmp_path: Path) -> None:
    check(on_ray, tmp_path)
