"""What the model says of small cases is what one computes by hand."""

import math

import numpy as np
import pytest

from braidax.errors import ArgumentError
from braidax.parallel import Link
from braidax.tune.search.candidates import Candidates, candidates
from braidax.tune.search.cluster import Cluster, Overheads
from braidax.tune.search.predicting import predict
from braidax.tune.search.ranking import rank
from braidax.tune.search.roles import (
    DATA,
    FULLY_SHARDED,
    HALVED,
    HYBRID,
    INTERLEAVED,
    ONE_EACH,
    ROTATED,
    STAGES,
    TENSOR,
    UNUSED,
    Offered,
)
from braidax.tune.search.splitting import Splits
from braidax.tune.search.workload import Workload

WORK = Workload(flops=8e9, variable_bytes=800, state_bytes=1600, activation_bytes=6400, summed_bytes=320)
LINK = Link(100.0, 0.5, 0.0)


def one(sizes: tuple[int, ...], kinds: tuple[int, ...], microbatches: int = 1) -> Candidates:
    return Candidates(np.array([sizes]), np.array([kinds]), np.array([microbatches]), ("data", "model"))


@pytest.mark.parametrize(
    ("sizes", "kinds", "microbatches", "seconds", "memory", "sent"),
    [
        ((1, 1), (UNUSED, UNUSED), 1, 8.0, 3200 + 6400, 0),
        ((4, 1), (DATA, UNUSED), 1, 2 + 12 + 1, 3200 + 1600, 1200),
        ((4, 1), (FULLY_SHARDED, UNUSED), 2, 2 + 36 + 3, 800 + 800 + 600 + 2 * 200, 3600),
        ((1, 4), (UNUSED, ROTATED), 1, 2 + 18 + 4.5, 800 + 1600, 1800),
        ((1, 4), (UNUSED, TENSOR), 1, 2 + 2.4 + 2, 800 + 1600, 240),
        ((2, 2), (DATA, FULLY_SHARDED), 1, 2 + 4 + 1 + 12 + 1.5, 1600 + 1600, 400 + 1200),
    ],
)
def test_a_case_by_hand(
    sizes: tuple[int, ...], kinds: tuple[int, ...], microbatches: int, seconds: float, memory: float, sent: float
) -> None:
    found = predict(one(sizes, kinds, microbatches), WORK, Cluster(math.prod(sizes), 1e9, LINK))
    assert [column[0] for column in found] == pytest.approx([seconds, memory, sent])


def test_what_products_do_not_split_is_whole_on_each_device() -> None:
    work = WORK._replace(splits=(Splits(4, 0.5, 0.25, 0.5, 160.0),))
    found = predict(one((1, 4), (UNUSED, TENSOR)), work, Cluster(4, 1e9, LINK))
    memory = 3200 * (0.5 / 4 + 0.5) + 6400 * (0.25 / 4 + 0.75)
    assert [column[0] for column in found] == pytest.approx([8 * (0.5 / 4 + 0.5) + 1.2 + 2, memory, 120])


TABLES = WORK._replace(table_bytes=400, row_bytes=40)
STAGED = WORK._replace(cut_bytes=160, most_stages=8)


@pytest.mark.parametrize(
    ("sizes", "kinds", "microbatches", "seconds", "memory", "sent"),
    [
        # half of the variables all-reduced, of the other half rows of 10 bytes a device there and back
        ((4, 1), (HYBRID, UNUSED), 1, 2 + (600 + 15) / 100 + 2, 1600 + 300 + 40 + 1600, 615),
        ((2, 2), (HYBRID, TENSOR), 1, 2 + 2.2 + 2 + 0.8 + 2, 800 + 300 + 80 + 1600, 220 + 80),
        # five microbatches' time for two of them; twice 80 bytes over each of three borders, there and back
        ((4, 1), (ONE_EACH, UNUSED), 2, 2 * 5 / 2 + 2 * 3 * (0.8 + 0.5), 800 + 3200 / 4 * 2, 2 * 160 * 3 / 4),
        ((4, 1), (HALVED, UNUSED), 8, 2 * 9 / 8 + 8 * 2 * 0.5 + 2.4, 800 + 800, 240),
        ((4, 1), (INTERLEAVED, UNUSED), 4, 2 * 5.5 / 4 + 4 * 4 * 0.5 + 5.6, 800 + 400 * 4, 2 * 160 * 7 / 4),
        ((2, 2), (ONE_EACH, DATA), 2, 2 * 3 / 2 + 2 * 2 * 0.5 + 0.8 + 4 + 1, 1600 + 800 * 2, 80 + 400),
    ],
)
def test_tables_by_rows_and_stages_by_hand(
    sizes: tuple[int, ...], kinds: tuple[int, ...], microbatches: int, seconds: float, memory: float, sent: float
) -> None:
    work = TABLES if HYBRID in kinds else STAGED
    found = predict(one(sizes, kinds, microbatches), work, Cluster(math.prod(sizes), 1e9, LINK))
    assert [column[0] for column in found] == pytest.approx([seconds, memory, sent])


@pytest.mark.parametrize(
    ("kind", "microbatches", "memory"),
    [
        (DATA, 1, 3200 + 800),  # gradients before they are summed
        (DATA, 2, 3200 + 800 + 400 + 50),  # what they are added up in, and those of tables
        (FULLY_SHARDED, 1, 800 + 800 + 400 * 0.75),  # what is gathered, and gradients of products
    ],
)
def test_what_collectives_read_counts_where_activations_are_fewer(kind: int, microbatches: int, memory: float) -> None:
    work = WORK._replace(activation_bytes=400, table_bytes=400)
    found = predict(one((4, 1), (kind, UNUSED), microbatches), work, Cluster(4, 1e9, LINK))
    assert found.memory_bytes[0] == pytest.approx(memory)


def test_what_is_not_sharded_is_whole_on_each_device() -> None:
    work = WORK._replace(activation_bytes=400, gathered=((4, 0.5),))
    found = predict(one((4, 1), (FULLY_SHARDED, UNUSED)), work, Cluster(4, 1e9, LINK))
    assert found.memory_bytes[0] == pytest.approx(3200 * (0.5 / 4 + 0.5) + 400 + 0.5 * (800 + 600))


@pytest.mark.parametrize(
    ("sizes", "kinds", "memory"),
    [
        (
            (4, 1),
            (ROTATED, UNUSED),
            800 + 200 + 400,
        ),  # nothing is whole, nothing gathered; parts come as others are used
        ((2, 2), (ROTATED, FULLY_SHARDED), 1600 * (0.5 / 2 + 0.5) + 200 + 0.5 * (400 + 200) + 800),  # of a half of each
    ],
)
def test_a_ring_divides_all_and_gathers_nothing(sizes: tuple[int, ...], kinds: tuple[int, ...], memory: float) -> None:
    work = WORK._replace(activation_bytes=400, gathered=((2, 0.5), (4, 0.5)))
    found = predict(one(sizes, kinds), work, Cluster(4, 1e9, LINK))
    assert found.memory_bytes[0] == pytest.approx(memory)


@pytest.mark.parametrize(
    ("kind", "microbatches", "programs"), [(DATA, 2, 2), (ONE_EACH, 2, 5), (HALVED, 2, 7), (INTERLEAVED, 4, 17)]
)
def test_programs_take_their_time_besides(kind: int, microbatches: int, programs: int) -> None:
    many = one((4, 1), (kind, UNUSED), microbatches)
    found = [
        predict(many, STAGED, Cluster(4, 1e9, LINK, overheads=Overheads(program_seconds=one))).seconds[0]
        for one in (0.0, 0.25)
    ]
    assert found[1] - found[0] == pytest.approx(0.25 * programs)


@pytest.mark.parametrize(
    ("sizes", "kinds", "touched"),
    [
        ((4, 1), (DATA, UNUSED), 3 * 800 + 2 * 1600),
        ((4, 1), (ROTATED, UNUSED), (3 * 800 + 2 * 1600) / 4),
        ((4, 1), (FULLY_SHARDED, UNUSED), (3 * 800 + 2 * 1600) * (0.5 / 4 + 0.5)),
        ((2, 2), (TENSOR, FULLY_SHARDED), (3 * 800 + 2 * 1600) / 2 * (0.5 / 2 + 0.5)),
        ((4, 1), (HYBRID, UNUSED), (3 * 800 + 2 * 1600) / 2),  # the other half are tables by rows
        ((2, 2), (ONE_EACH, DATA), (3 * 800 + 2 * 1600) / 2),
    ],
)
def test_an_update_takes_as_long_as_what_it_touches(
    sizes: tuple[int, ...], kinds: tuple[int, ...], touched: float
) -> None:
    work = (TABLES if HYBRID in kinds else STAGED)._replace(gathered=((2, 0.5), (4, 0.5)))
    clusters = [Cluster(4, 1e9, LINK, overheads=Overheads(update_bytes_per_second=rate)) for rate in (None, 100.0)]
    found = [predict(one(sizes, kinds), work, cluster).seconds[0] for cluster in clusters]
    assert found[1] - found[0] == pytest.approx(touched / 100)
    assert work.touched_bytes == 3 * 800 + 2 * 1600


def test_tables_in_a_ring_are_not_by_rows() -> None:
    found = [predict(one((2, 2), (kind, ROTATED)), TABLES, Cluster(4, 1e9, LINK)) for kind in (DATA, HYBRID)]
    assert found[0].memory_bytes == found[1].memory_bytes
    assert found[0].sent_bytes == found[1].sent_bytes


def test_roles_that_a_loss_has_no_use_for_are_not_offered() -> None:
    assert not np.isin(candidates(8, 64).kinds, (HYBRID, *STAGES)).any()
    many = candidates(8, 64, offered=Offered(tables=True, most_stages=4))
    kinds, sizes, pieces = many.kinds, many.sizes, many.microbatches
    is_stage = np.isin(kinds, STAGES)
    assert {*sizes[is_stage].tolist()} == {2, 4}
    assert {*sizes[kinds == INTERLEAVED].tolist()} == {2}  # of two stages each
    assert (is_stage.sum(1) <= 1).all()
    assert ((kinds == HYBRID).sum(1) <= 1).all()
    assert not ((kinds == HYBRID).any(1) & (kinds == DATA).any(1)).any()
    rows_at, whole_at = ((kinds == one).argmax(1) for one in (HYBRID, FULLY_SHARDED))
    both = (kinds == HYBRID).any(1) & (kinds == FULLY_SHARDED).any(1)
    assert both.any()
    assert (rows_at < whole_at)[both].all()
    assert (pieces[is_stage.any(1)] > 1).all()
    interleaved = (kinds == INTERLEAVED).any(1)
    assert (pieces[interleaved] % np.where(kinds == INTERLEAVED, sizes, 1).prod(1)[interleaved] == 0).all()
    assert many.strategies(int(np.flatnonzero((kinds == HYBRID).any(1))[0]))


def test_axes_that_leave_a_host_have_the_slower_link() -> None:
    cluster = Cluster(4, 1e9, LINK, between=Link(10.0, 5.0, 0.0), devices_per_host=2)
    found = predict(one((2, 2), (DATA, FULLY_SHARDED)), WORK, cluster)
    assert found.seconds[0] == pytest.approx(2 + 40 + 10 + 12 + 1.5)


@pytest.mark.parametrize(("kind", "seconds"), [(DATA, 1200 / 50 + 2 * 0.25), (FULLY_SHARDED, 1800 / 100 + 3 * 0.5)])
def test_gradients_that_are_summed_whole_have_a_link_of_their_own(kind: int, seconds: float) -> None:
    cluster = Cluster(4, 1e9, LINK, sums=Link(50.0, 0.25, 0.0))
    assert predict(one((4, 1), (kind, UNUSED)), WORK, cluster).seconds[0] == pytest.approx(2 + seconds)


def test_what_products_hide_does_not_count() -> None:
    found = predict(one((4, 1), (DATA, UNUSED)), WORK, Cluster(4, 1e9, Link(100.0, 0.5, 1.0)))
    assert found.seconds[0] == pytest.approx(2 + 13 - 2)


@pytest.mark.parametrize("devices", [1, 6, 8])
def test_all_meshes_are_there_once(devices: int) -> None:
    many = candidates(devices, 48)
    rows = [(*size, *kind, piece) for size, kind, piece in zip(many.sizes, many.kinds, many.microbatches, strict=True)]
    assert len(set(rows)) == len(rows)
    assert (many.sizes.prod(1) == devices).all()
    meshes = {tuple(size) for size in many.sizes.tolist()}
    triples = [
        (a, b, c)
        for a in range(1, 9)
        for b in range(1, 9)
        for c in range(1, 9)
        if a * b * c == devices and not (a == 1 < b or b == 1 < c)
    ]
    assert meshes == set(triples)
    parts = np.where(many.kinds == TENSOR, 1, many.sizes).prod(1)
    assert (48 % (parts * many.microbatches) == 0).all()


def test_order_of_axes_and_one_axis_in_two_count_once() -> None:
    sizes = [[2, 2], [4, 1], [2, 2], [2, 2], [4, 1], [4, 1]]
    kinds = [[DATA, DATA], [DATA, UNUSED], [DATA, TENSOR], [TENSOR, DATA], [DATA, UNUSED], [TENSOR, UNUSED]]
    found = Candidates(np.array(sizes), np.array(kinds), np.array([1, 1, 1, 1, 2, 1]), ("data", "model")).distinct()
    assert found.sizes.tolist() == [sizes[at] for at in (1, 2, 4, 5)]
    assert found.kinds.tolist() == [kinds[at] for at in (1, 2, 4, 5)]
    assert found.microbatches.tolist() == [1, 1, 2, 1]


@pytest.mark.parametrize(
    ("between", "per_host", "has"),
    [(None, 2, False), (LINK, 2, False), (Link(7.0), 8, False), (Link(7.0), None, False), (Link(7.0), 2, True)],
)
def test_hosts_count_where_their_link_is_another_one(between: Link | None, per_host: int | None, has: bool) -> None:
    assert Cluster(8, 1e9, LINK, between, per_host).has_two_links == has


def test_the_fastest_that_fits_wins_and_says_why() -> None:
    many = Candidates(
        np.array([[4, 1]] * 2), np.array([[DATA, -1], [FULLY_SHARDED, -1]]), np.array([1, 1]), ("data", "x")
    )
    free = rank(many, WORK, Cluster(4, 1e9, LINK))
    assert (free.order, free.num_refused) == ((0, 1), 0)
    assert free.why() == "43.3 % faster than data=4 fully_sharded: sends 1.5 × fewer bytes"
    tight = rank(many, WORK, Cluster(4, 1e9, LINK, memory_bytes=2400))
    assert (tight.order, tight.num_refused, tight.why()) == ((1,), 1, "nothing else fits")
    with pytest.raises(
        ArgumentError, match=r"memory_bytes=1200: it binds, all 2 .* data=4 fully_sharded, needs 2,400, 2 ×"
    ):
        rank(many, WORK, Cluster(4, 1e9, LINK, memory_bytes=1200))
    assert rank(many, WORK, Cluster(4, 1e9, LINK, memory_bytes=3000), headroom=0.25).order == (1,)
    told = r"needs 3,000 \(25 % more than is predicted, as nothing is compiled\), 1 ×"
    with pytest.raises(ArgumentError, match=told):
        rank(many, WORK, Cluster(4, 1e9, LINK, memory_bytes=2999), headroom=0.25)


@pytest.mark.parametrize("name", ["devices", "batch_size"])
def test_no_devices_and_no_samples_are_refused(name: str) -> None:
    sizes = {"devices": 4, "batch_size": 8, name: 0}
    with pytest.raises(ArgumentError, match=f"{name}=0: expected a whole number of at least 1"):
        candidates(sizes["devices"], sizes["batch_size"])


def test_a_cluster_survives_json_and_refuses_what_is_none() -> None:
    cluster = Cluster(
        8,
        1e12,
        LINK,
        between=Link(5.0),
        devices_per_host=4,
        memory_bytes=9,
        overheads=Overheads(1e-3, 2e-3, 5e9),
        sums=LINK,
    )
    assert Cluster.from_json(cluster.to_json()) == cluster
    with pytest.raises(ArgumentError, match="text is no cluster"):
        Cluster.from_json("[]")
    with pytest.raises(ArgumentError, match="devices=0: expected a positive number"):
        Cluster(0, 1e12, LINK)
    with pytest.raises(ArgumentError, match=r"step_seconds=-1: expected 0 or more"):
        Overheads(-1)
    with pytest.raises(ArgumentError, match=r"update_bytes_per_second=0: expected a positive number"):
        Overheads(update_bytes_per_second=0)
