"""Writes files of ArrayRecord, by its own writer."""

from collections.abc import Sequence
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordWriter


def written(path: Path, records: Sequence[bytes], options: str = "group_size:1") -> Path:
    """Writes records to a file. **Returns:** its path."""
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path
