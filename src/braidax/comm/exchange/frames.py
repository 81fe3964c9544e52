"""How items lie in a stream: frames of one or more, cut into chunks.

A frame is a table of 64-bit words, and behind it the buffers of its items, each at a multiple of `ALIGNMENT`. The words
are the kind, the bytes of the frame, the number of words that follow, and for each item how many buffers it has and how
long each is.
"""

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from braidax.comm.messages import ALIGNMENT
from braidax.comm.transports.transport import Buffer

DATA, SKIP, END = range(3)
"""Kinds of frames: items; a chunk that is left out, so that a frame lies in one piece; the end of a stream."""

_FIXED = struct.Struct("<QQQ")
_WORD_BYTES = 8
_ZEROS = memoryview(bytes(ALIGNMENT))
_MAX_PARTS = 64  # of a chunk: more are copied into one, which is quicker

SKIPPED = memoryview(_FIXED.pack(SKIP, _FIXED.size, 0))
ENDED = memoryview(_FIXED.pack(END, _FIXED.size, 0))

Spans = list[tuple[int, int]]
"""Where the buffers of an item begin and end in their frame."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How large everything is, the same on all ranks.

    **Fields:** `chunk_bytes`: of one message. `num_chunks`: that a receiver has room for, of each sender. `num_ahead`:
    receives that are posted ahead. `flight_bytes`: that a rank has given to its transport and not got back.
    """

    chunk_bytes: int
    num_chunks: int
    num_ahead: int
    flight_bytes: int

    @property
    def pair_bytes(self) -> int:
        """What a receiver has room for, of each sender: the most that a frame may have."""
        return self.chunk_bytes * self.num_chunks


def item_bytes(buffers: Sequence[Buffer]) -> int:
    """Returns the bytes of a frame of one item."""
    num_bytes = rounded_up(_FIXED.size + _WORD_BYTES * (1 + len(buffers)))
    for buffer in buffers:
        num_bytes += rounded_up(len(buffer))
    return num_bytes


def frame_of(items: Sequence[Sequence[Buffer]]) -> tuple[list[Buffer], int]:
    """Returns the parts of a frame, none of them empty, and their bytes."""
    words: list[int] = []
    body: list[Buffer] = []
    for item in items:
        words.append(len(item))
        for buffer in item:
            words.append(len(buffer))
            if len(buffer):
                body.append(buffer)
    begin = _FIXED.size + _WORD_BYTES * len(words)
    if not body:
        return [_table_of(begin, words)], begin
    first = rounded_up(begin)
    num_bytes = first
    parts: list[Buffer] = []
    for buffer in body:
        if gap := -num_bytes % ALIGNMENT:
            parts.append(_ZEROS[:gap])
            num_bytes += gap
        parts.append(buffer)
        num_bytes += len(buffer)
    return [_table_of(num_bytes, words, first - begin), *parts], num_bytes


def _table_of(num_bytes: int, words: Sequence[int], gap: int = 0) -> Buffer:
    """Returns the table of a frame, and so many zeros behind it."""
    return memoryview(struct.pack(f"<{len(words) + 3}Q{gap}x", DATA, num_bytes, len(words), *words))


def cut(parts: list[Buffer], num_bytes: int, chunk_bytes: int) -> list[list[Buffer]]:
    """Returns the parts of each chunk of a frame of so many bytes."""
    if num_bytes <= chunk_bytes and len(parts) <= _MAX_PARTS:
        return [parts]
    chunks: list[list[Buffer]] = [[]]
    room = chunk_bytes
    for part in parts:
        begin = 0
        while begin < len(part):
            if not room:
                chunks.append([])
                room = chunk_bytes
            piece = part[begin : begin + room]
            chunks[-1].append(piece)
            begin += len(piece)
            room -= len(piece)
    return [chunk if len(chunk) <= _MAX_PARTS else [memoryview(b"".join(chunk))] for chunk in chunks]


def begins(memory: Buffer, begin: int, num_bytes: int) -> tuple[int, int]:
    """Returns the kind of a frame, and its bytes. **Arguments:** `begin`: of its first chunk, of so many bytes.

    **Raises:** `ValueError` for what begins no frame.
    """
    if num_bytes < _FIXED.size:
        raise ValueError(f"it has {num_bytes} bytes")
    kind, whole, _ = _FIXED.unpack_from(memory, begin)
    if kind > END or whole < num_bytes or (kind != DATA and whole != _FIXED.size):
        raise ValueError(f"its kind is {kind}, and it announces {whole:,} bytes in {num_bytes:,}")
    return kind, whole


def items_of(memory: Buffer) -> deque[Spans]:
    """Returns the items of a frame. **Raises:** `ValueError` for one that cannot be."""
    _, _, num_words = _FIXED.unpack_from(memory)
    position = _FIXED.size + _WORD_BYTES * num_words
    if position > len(memory):
        raise ValueError(f"its table has {num_words:,} words in {len(memory):,} bytes")
    words = struct.unpack_from(f"<{num_words}Q", memory, _FIXED.size)
    items: deque[Spans] = deque()
    index = 0
    while index < num_words:
        count = words[index]
        lengths = words[index + 1 : index + 1 + count]
        if len(lengths) < count:
            raise ValueError(f"its table ends within an item of {count:,} buffers")
        index += 1 + count
        spans: Spans = []
        for length in lengths:
            if length:
                position = rounded_up(position)
            spans.append((position if length else 0, position + length if length else 0))
            position += length
        items.append(spans)
    if not items or position != len(memory):
        raise ValueError(f"its buffers end at {position:,} of {len(memory):,} bytes")
    return items


def rounded_up(num_bytes: int) -> int:
    """Returns the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
