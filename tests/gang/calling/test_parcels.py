"""Parcels: what is beside a pickle, and what comes over a stream from whoever is at its other end."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidax.errors import GangError
from braidax.gang.calling import parcels
from braidax.gang.calling.parcels import (
    ALIGNMENT,
    MAX_PART_BYTES,
    MAX_PARTS,
    OUT_OF_BAND_BYTES,
    Inbox,
    Parcel,
    framed,
    pack,
    unpack,
)


def deliver(inbox: Inbox, data: bytes, piece_bytes: int) -> list[tuple[int, Parcel, Parcel]]:
    """Gives an inbox bytes in pieces, as a socket would."""
    found: list[tuple[int, Parcel, Parcel]] = []
    view = memoryview(data)
    while view:
        count = min(piece_bytes, len(view), inbox.space.nbytes)
        inbox.space[:count] = view[:count]
        got = inbox.fill(count)
        found += [] if got is None else [got]
        view = view[count:]
    return found


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


@given(
    st.lists(st.tuples(st.lists(st.binary(max_size=20_000), max_size=3), st.lists(st.binary(max_size=20_000)))),
    st.integers(1, 9000),
)
def test_what_is_framed_arrives(messages: list[tuple[list[bytes], list[bytes]]], piece_bytes: int) -> None:
    messages = [message for message in messages if message[0] or message[1]]
    data = b"".join(bytes(view) for number, each in enumerate(messages) for view in framed(number % 3, *each))
    found = deliver(Inbox(num_kinds=3), data, piece_bytes)
    assert found == [(number % 3, list(head), list(body)) for number, (head, body) in enumerate(messages)]


def test_what_is_received_is_aligned_and_may_be_written() -> None:
    sent = np.arange(100_000)
    ((_, head, _),) = deliver(Inbox(1), b"".join(bytes(view) for view in framed(0, pack(sent))), 1 << 16)
    array = unpack(head)
    assert (array.ctypes.data % ALIGNMENT, array.flags.writeable) == (0, True)
    np.testing.assert_array_equal(array, sent)
    assert [memoryview(part).nbytes for part in parcels.own(head)] == [memoryview(part).nbytes for part in head]


def announced(kind: int, num_first: int, lengths: list[int], num_parts: int | None = None) -> bytes:
    """Returns a header."""
    count = len(lengths) if num_parts is None else num_parts
    return struct.pack("<HHI", kind, num_first, count) + b"".join(length.to_bytes(8, "little") for length in lengths)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (announced(2, 1, [1]), r"a message of kind 2 with 1 of 1 parts was announced; expected a kind below 2"),
        (announced(0, 0, []), r"kind 0 with 0 of 0 parts .*1 to 4,096 parts"),
        (announced(0, 2, [1]), r"with 2 of 1 parts"),
        (announced(0, 0, [], MAX_PARTS + 1), r"0 of 4,097 parts"),
        (announced(0, 0, [], (1 << 32) - 1), r"0 of 4,294,967,295 parts"),
        (announced(0, 1, [MAX_PART_BYTES + 1]), r"a part of 17,592,186,044,417 bytes was announced; expected at most"),
        (announced(0, 1, [1, (1 << 64) - 1]), r"a part of 18,446,744,073,709,551,615 bytes was announced"),
    ],
)
def test_what_is_no_message_is_refused(header: bytes, message: str) -> None:
    with pytest.raises(GangError, match=message):
        deliver(Inbox(num_kinds=2), header, 7)


def test_a_length_alone_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox(1)
    deliver(inbox, announced(0, 1, [1 << 33]), 100)
    assert inbox.space.nbytes == 1 << 33
    assert _resident() < 1 << 33

    def no_room(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(parcels, "room_for", no_room)
    with pytest.raises(
        GangError, match="a part of 8,589,934,592 bytes was announced, and this host has no room for it"
    ):
        deliver(Inbox(1), announced(0, 1, [1 << 33]), 100)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
