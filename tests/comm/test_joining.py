"""Joining by what the environment says."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braidax.comm import TcpStoreServer, from_environment
from braidax.errors import ArgumentError
from tests.support.comm.stores.servers import SECRET


def test_ranks_join_by_their_environment(tmp_path: Path) -> None:
    def join(variables: dict[str, str], found: list[Any]) -> None:
        with from_environment(variables, timeout_seconds=30) as comm:
            found.append((comm.rank, comm.size, float(comm.all_reduce(np.ones(2)).sum())))
            comm.barrier()

    with TcpStoreServer(secret=SECRET) as server:
        for place in ({"BRAIDAX_STORE": f"file://{tmp_path}"}, {"BRAIDAX_STORE": server.address}):
            found: list[Any] = []
            shared = {**place, "BRAIDAX_SECRET": SECRET.hex(), "BRAIDAX_SIZE": "2", "BRAIDAX_GENERATION": "3"}
            threads = [
                threading.Thread(target=join, args=({**shared, "BRAIDAX_RANK": str(rank)}, found)) for rank in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert sorted(found) == [(0, 2, 4.0), (1, 2, 4.0)]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"BRAIDAX_RANK is not set: .* start the program with `braidax launch"):
        from_environment({})
    with pytest.raises(ArgumentError, match="BRAIDAX_STORE is not set"):
        from_environment({"BRAIDAX_RANK": "0", "BRAIDAX_SIZE": "1"})
    with pytest.raises(ArgumentError, match="BRAIDAX_SECRET is not hexadecimal; expected"):
        from_environment(
            {"BRAIDAX_RANK": "0", "BRAIDAX_SIZE": "1", "BRAIDAX_STORE": "tcp://h:1", "BRAIDAX_SECRET": "xyz"}
        )
