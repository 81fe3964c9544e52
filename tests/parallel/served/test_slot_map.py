"""Maps of ids to slots against a dict: whatever is inserted and removed, and however full they are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.parallel.served.on_servers.growing import slot_map
from braidax.parallel.served.on_servers.growing.slot_map import SlotMap, Slots

FULL = 0.99
NUM = 64_000
FAMILIES = {
    "sequential": np.arange(NUM, dtype=np.int64),
    "every 2^12th": np.arange(NUM, dtype=np.int64) << 12,
    "every 2^32nd": np.arange(NUM, dtype=np.int64) << 32,
    "all but the upper bits alike": (np.arange(NUM, dtype=np.int64) << 40) | 12345,
    "every third, from far on": 2**31 - 1 - 3 * np.arange(NUM, dtype=np.int64),
    "random": np.unique(np.random.default_rng(0).integers(0, 2**62, NUM)),
}


DEEDS = st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 40).map(lambda one: one << 8))), max_size=30)


@given(deeds=DEEDS, load=st.sampled_from([0.5, FULL]), is_compiled=st.booleans())
def test_it_is_a_dict(deeds: list[tuple[bool, set[int]]], load: float, is_compiled: bool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slot_map, "_FEWEST", 16)  # so that it grows, and entries go on at the start
        if not is_compiled:
            patched.setattr(slot_map, "compiled", lambda: None)
        compare(deeds, load)


def compare(deeds: list[tuple[bool, set[int]]], load: float) -> None:
    tested, expected, number = SlotMap(most_load=load), dict[int, int](), 0
    for adds, ids in deeds:
        chosen = np.array(sorted(one for one in ids if (one in expected) != adds), np.int64)
        if adds:
            slots = np.arange(number, number + len(chosen), dtype=np.int32)
            number += len(chosen)
            tested.insert(chosen, slots)
            expected.update(zip(chosen.tolist(), slots.tolist(), strict=True))
        else:
            tested.remove(chosen)
            for one in chosen.tolist():
                del expected[one]
        asked = np.arange(0, 41 << 8, 1 << 7)
        assert len(tested) == len(expected)
        assert tested.find(asked).tolist() == [expected.get(one, -1) for one in asked.tolist()]


@pytest.mark.parametrize("family", FAMILIES)
def test_searches_are_short_where_99_of_100_entries_are_used(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there is known as soon as what is. A chain of all would be 64,000 long."""
    ids = FAMILIES[family]
    monkeypatch.setattr(slot_map, "_FEWEST", -(-len(ids) * 1000 // 989))
    made = SlotMap(most_load=FULL)
    made.insert(ids, np.arange(len(ids)))
    assert len(ids) / len(made._entries) > 0.985
    np.testing.assert_array_equal(made.find(ids), np.arange(len(ids)))
    assert made.longest < 1500
    assert (made.find(ids + 1 if family == "random" else ids ^ (1 << 61)) < 0).all()
    assert made.longest < 1500
    made.remove(ids[::2])
    assert (made.find(ids[::2]) < 0).all()
    np.testing.assert_array_equal(made.find(ids[1::2]), np.arange(len(ids))[1::2])
    made.insert(ids[::2], np.arange(len(ids))[::2])
    np.testing.assert_array_equal(made.find(ids), np.arange(len(ids)))


def test_each_map_has_hashes_of_its_own() -> None:
    """Who knows those of one makes another no slower."""
    first, second = SlotMap(), SlotMap()
    assert (first._table != second._table).any()


@pytest.mark.parametrize("ids", [[-1], [3, 3]])
def test_what_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="expected ids of 0 or more, a slot for each, and room"):
        SlotMap().insert(np.array(ids), np.arange(len(ids)))


@pytest.mark.parametrize("load", [0.0, 1.0])
def test_a_load_that_leaves_no_room(load: float) -> None:
    with pytest.raises(ValueError, match="expected a number above 0 and below 1"):
        SlotMap(most_load=load)


def test_slots_are_used_again() -> None:
    slots = Slots(5)
    first = slots.take(4)
    slots.give_back(first[1:3])
    again = slots.take(3)
    assert sorted([*again.tolist(), *first[[0, 3]].tolist()]) == [0, 1, 2, 3, 4]
    assert slots.end == 5
    with pytest.raises(ValueError, match="1 slots of 5 were wanted, and fewer are free"):
        slots.take(1)
