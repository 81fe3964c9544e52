"""Writes files of TFRecord, by the writer of tensorboardX."""

from pathlib import Path

from tensorboardX.record_writer import RecordWriter


def write(path: Path, records: list[bytes]) -> Path:
    """Writes records to a file. **Returns:** its path."""
    path.touch()
    writer = RecordWriter(str(path))
    for record in records:
        writer.write(record)
    writer.close()
    return path
