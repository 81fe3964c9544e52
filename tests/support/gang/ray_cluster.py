"""A cluster of Ray on this machine, for the tests of a file."""

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Generator

import pytest
import ray

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one into the home folder
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",  # a process for each CPU, of which tests use few
}


@contextlib.contextmanager
def ray_cluster(*, num_cpus: int = 8) -> Generator[None]:
    """Connects this process to a cluster of its own. **Arguments:** `num_cpus`: so many tasks run at once."""
    folder = tempfile.mkdtemp(prefix="braidax-", dir="/tmp")  # the names of Ray's sockets must not be long
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "")
        patch.delenv("RAY_AUTH_MODE")  # `ray.init` sets it, and here it is taken back
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        try:
            ray.init(
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=200 << 20,
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
