"""What the pages of a Parquet column become when they are decompressed, by their headers.

pyarrow makes room for what a header says before it looks at the page, and knows no limit. Source: Apache Parquet,
`parquet.thrift` (`PageHeader`), and the compact protocol of Apache Thrift.
"""

from typing import Any

from braidax.data.storage.files import Bytes

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_VARINTS = frozenset({4, 5, 6})
_NUM_VALUES_IN = {0: 5, 3: 8}  # by the type of a page, of which of its fields; other pages have no values of the column
_MAX_DEPTH = 16


def inflated_bytes(chunk: Bytes, num_values: int) -> int:
    """Returns how many bytes the pages of a column chunk say that they become when decompressed.

    **Arguments:** `chunk`: its bytes. `num_values`: of the chunk; what follows the pages that have them is not looked
    at, nor does pyarrow.

    **Raises:** `ValueError` for a header that is damaged.
    """
    place = num_bytes = num_seen = 0
    while num_seen < num_values and place < len(chunk):
        header = _Reader(chunk, place)
        fields = header.struct()
        try:
            kind, inflated, stored = (int(fields[field]) for field in (1, 2, 3))
            count = int(fields[_NUM_VALUES_IN[kind]][1]) if kind in _NUM_VALUES_IN else 0
        except (KeyError, TypeError):  # a field is missing, or of another type
            raise ValueError(f"the page at byte {place:,} has no sizes") from None
        if min(inflated, stored, count) < 0:
            raise ValueError(f"the page at byte {place:,} has {inflated:,} bytes of {stored:,}, and {count:,} values")
        num_bytes += inflated
        num_seen += count
        place = header.place + stored
    return num_bytes


class _Reader:
    """Reads values of the compact protocol: integers and structs are kept, all else is stepped over."""

    def __init__(self, data: Bytes, place: int) -> None:
        self._data = data
        self.place = place

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Returns the integers and structs of a struct, by the numbers of their fields."""
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            value = self._integer() if kind in _VARINTS else self._value(kind, depth)
            if value is not None:
                found[number] = value
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"the page header at byte {self.place:,} is nested without end")
        if kind in _VARINTS:
            return self._integer()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_BYTE, _DOUBLE):
            self._skip(1 if kind == _BYTE else 8)
        elif kind == _BINARY:
            self._skip(self._varint())
        elif kind in (_LIST, _SET):
            head = self._byte()
            self._values(head >> 4 if head >> 4 < 15 else self._varint(), (head & 15,), depth)
        elif kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            self._values(count, (kinds >> 4, kinds & 15), depth)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError(f"the page header at byte {self.place:,} has a field of the type {kind}")
        return None

    def _values(self, count: int, kinds: tuple[int, ...], depth: int) -> None:
        for _ in range(count):
            for kind in kinds:
                if kind in (_TRUE, _FALSE):  # in a list they take a byte
                    self._skip(1)
                else:
                    self._value(kind, depth + 1)

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        if (byte := self._byte()) < 128:  # as nearly all are
            return byte
        value, shift = byte & 127, 7
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise ValueError(f"the page header at byte {self.place:,} has a number of more than 64 bits")
        return value | byte << shift

    def _byte(self) -> int:
        try:
            byte = self._data[self.place]
        except IndexError:
            raise ValueError("a page header ends behind its column") from None
        self.place += 1
        return byte

    def _skip(self, num_bytes: int) -> None:
        self.place += num_bytes
        if self.place > len(self._data):
            raise ValueError("a page header ends behind its column")
