"""Gradients of rows of several processes on a host, of which one alone goes to the servers."""

from typing import Any

import numpy as np
import pytest

from braidax.comm import Communicator
from braidax.errors import CommError, PeerLost
from braidax.parallel.served.batches.batch_rows import BatchRows
from braidax.parallel.served.batches.on_host import summed_on_host
from braidax.parallel.served.wire import packed
from tests.support.comm.ranks import outcomes

WIDTH = 3
IDS = {"words": [[1, 4, 9], [4, 5], []], "other": [[], [7], [2, 7]]}


def given(rank: int) -> tuple[dict[str, BatchRows], dict[str, Any]]:
    rows = {name: BatchRows({0: np.asarray(ids[rank], np.int32)}, 2) for name, ids in IDS.items()}
    random = np.random.default_rng(rank)
    return rows, {name: random.normal(size=(len(one.unique), WIDTH)).astype(np.float32) for name, one in rows.items()}


def test_the_first_process_has_the_sums_of_all_and_others_nothing() -> None:
    first, *others = outcomes(3, lambda host: summed_on_host(host, *given(host.rank), 5))
    rows, sums = first
    for name, ids in IDS.items():
        wanted = np.zeros((10, WIDTH), np.float32)
        for rank, own in enumerate(ids):
            wanted[own] += given(rank)[1][name]
        assert [*rows[name].unique] == sorted({one for own in ids for one in own})
        np.testing.assert_array_equal(sums[name], wanted[rows[name].unique])
        np.testing.assert_array_equal(rows[name].asked(1), [id // 2 for id in rows[name].unique if id % 2])
        for nobody, nothing in others:
            assert (nobody[name].unique.size, nothing[name].shape) == (0, (0, WIDTH))
            assert nobody[name].asked(1).size == 0


@pytest.mark.parametrize(
    ("fields", "ids", "gradients", "message"),
    [
        (
            {"step": 4},
            [1],
            np.zeros((1, WIDTH), np.float32),
            r"gradients of update 4 of \['words'\], expected those of",
        ),
        ({"tables": ["more"]}, [1], np.zeros((1, WIDTH), np.float32), r"update 5 of \['more'\], expected"),
        ({}, [1], np.zeros((2, WIDTH), np.float32), r"other gradients of words than float32\[u, 3\]"),
        ({}, [1], np.zeros((1, WIDTH)), r"other gradients of words than float32\[u, 3\]"),
        ({}, [2, 1], np.zeros((2, WIDTH), np.float32), "for u ids in order"),
        ({}, [-1], np.zeros((1, WIDTH), np.float32), "for u ids in order"),
    ],
)
def test_what_is_of_another_model_is_refused(
    fields: dict[str, Any], ids: list[int], gradients: Any, message: str
) -> None:
    def rank_main(host: Communicator) -> Any:
        if host.rank:
            arrays = {"0/ids": np.asarray(ids, np.int32), "0/gradients": gradients}
            host.send(packed("gradients", {"step": 5, "tables": ["words"], **fields}, arrays), 0)
            return None
        rows, own = given(0)
        with pytest.raises(CommError, match=message):
            summed_on_host(host, {"words": rows["words"]}, own, 5)
        return "refused"

    assert outcomes(2, rank_main) == ["refused", None]


def test_a_process_that_is_lost_is_told_of() -> None:
    def rank_main(host: Communicator) -> Any:
        return None if host.rank else summed_on_host(host, *given(0), 5)

    error, _ = outcomes(2, rank_main, on_loss="peer")
    assert isinstance(error, PeerLost)
    assert "a process that trains, too, is lost, and an update takes all" in str(error)
