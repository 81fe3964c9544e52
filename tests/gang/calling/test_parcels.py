"""Parcels: what is beside a pickle, and what comes over a channel from whoever is at its other end."""

import contextlib
import socket
import struct
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.connections.channel import ALIGNMENT, Frame
from braidax.errors import GangError
from braidax.gang.calling import parcels
from braidax.gang.calling.parcels import (
    MAX_PARTS,
    OUT_OF_BAND_BYTES,
    Parcel,
    channel_of,
    framed,
    pack,
    unframed,
    unpack,
)


def test_large_buffers_are_beside_the_pickle_and_are_not_copied() -> None:
    large, small = np.arange(OUT_OF_BAND_BYTES // 8), np.arange(10)
    parcel = pack({"large": [large, large[1:]], "small": small})
    assert [len(part) for part in parcel[1:]] == [OUT_OF_BAND_BYTES]  # large[1:] is below the limit
    assert np.shares_memory(np.frombuffer(parcel[1], np.uint8), large)
    assert len(parcel[0]) < 2 * OUT_OF_BAND_BYTES
    again = unpack(parcel)
    np.testing.assert_array_equal(again["large"][1], large[1:])
    np.testing.assert_array_equal(again["small"], small)


def test_a_pickle_keeps_the_buffers_that_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "MAX_PARTS", 40)
    arrays = [np.full(OUT_OF_BAND_BYTES, number, np.uint8) for number in range(10)]
    parcel = pack(arrays)
    assert len(parcel) == 1 + 40 // 2 - 16
    assert [int(array[0]) for array in unpack(parcel)] == list(range(10))


def test_names_stand_for_what_is_there() -> None:
    parcel = pack([1, {"a": "x"}, "y"], refer=lambda part: "name" if part == "x" else None)
    assert unpack(parcel, look_up=lambda name: f"what {name} is") == [1, {"a": "what name is"}, "y"]


@given(st.integers(0, 2), st.lists(st.binary(max_size=100), max_size=3), st.lists(st.binary(max_size=100), max_size=3))
def test_what_is_framed_comes_apart_again(kind: int, head: list[bytes], body: list[bytes]) -> None:
    if head or body:
        assert unframed(framed(kind, list(head), list(body)), num_kinds=3) == (kind, head, body)


def test_what_comes_over_a_channel_is_aligned_and_may_be_written() -> None:
    sent = np.arange(100_000)
    ours, theirs = map(channel_of, socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        ours.send(framed(0, pack(sent)))
        found: list[Frame] = []
        while not found:
            ours.flush()
            found = theirs.receive()
        _, head, _ = unframed(found[0], num_kinds=1)
    array = unpack(head)
    assert (array.ctypes.data % ALIGNMENT, array.flags.writeable) == (0, True)
    np.testing.assert_array_equal(array, sent)
    assert [memoryview(part).nbytes for part in parcels.own(head)] == [memoryview(part).nbytes for part in head]


def test_all_parts_of_a_parcel_go_over_a_channel() -> None:
    ours, theirs = map(channel_of, socket.socketpair())
    with contextlib.closing(ours), contextlib.closing(theirs):
        ours.send(framed(0, [b""] * MAX_PARTS))
        assert unframed(theirs.take(time.monotonic() + 20), num_kinds=1) == (0, [b""] * MAX_PARTS, [])


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (framed(2, [b"x"]), r"^a message of kind 2 with 1 of 1 parts came; expected a kind below 2 and no more parts"),
        ([struct.pack("!HH", 0, 2), b"x"], r"kind 0 with 2 of 1 parts came"),
        ([], r"^0 parts came, of which the first is no head; expected a head and a parcel"),
        (framed(0, []), r"^1 parts came"),
        ([b"abc", b"x"], r"^2 parts came, of which the first is no head"),
    ],
)
def test_what_is_no_message_is_refused(frame: Parcel, message: str) -> None:
    with pytest.raises(GangError, match=message):
        unframed(frame, num_kinds=2)
