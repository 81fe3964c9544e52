"""What an error that came up in a read says of the records: that they are bad, or nothing."""

import contextlib
from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from braidax.errors import BraidaxError, FormatError, ReadError, RecordError

_OF_THE_BYTES = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    AssertionError,
)
_DECODERS = ("PIL", "cv2", "zlib", "_lzma", "lzma", "gzip", "struct", "pickle", "_pickle", "numpy", "xml", "av")


def is_outage(error: BaseException) -> bool:
    """Says whether an error, or one that it came from, may be that of a disk, a server, a connection or the memory.

    What parses bytes raises errors of the kinds that Python itself has for wrong values, or of its own library. All
    else says nothing of the bytes: the next try may succeed.
    """
    seen: BaseException | None = error
    while seen is not None:
        if not _is_of_the_bytes(seen):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def _is_of_the_bytes(error: BaseException) -> bool:
    if isinstance(error, BraidaxError):
        return isinstance(error, RecordError | FormatError)
    if type(error).__module__.partition(".")[0] in _DECODERS:
        return True
    if isinstance(error, OSError):
        return type(error) is OSError and error.errno is None and _module_of(error) == "PIL"  # of images that are cut
    return isinstance(error, _OF_THE_BYTES)


def _module_of(error: BaseException) -> str:
    """Returns the library whose code raised an error."""
    trace, name = error.__traceback__, ""
    while trace is not None:
        name, trace = str(trace.tb_frame.f_globals.get("__name__", "")), trace.tb_next
    return name.partition(".")[0]


@contextlib.contextmanager
def naming_records(source: object, indices: NDArray[np.int64]) -> Generator[None]:
    """Makes a braidax error that names the records of whatever a source raises while it reads them."""
    try:
        yield
    except BraidaxError:
        raise
    except Exception as error:
        listed = [int(index) for index in indices[:8]]
        more = f"… ({len(indices)} in all)" if len(indices) > 8 else ""
        raised = (
            f"source={type(source).__name__} raised {type(error).__name__}: {error}, while it read the records "
            f"{listed}{more}"
        )
        if is_outage(error):
            raise ReadError(
                f"{raised}; that says nothing of the records: check the disk, the server, the network or the memory"
            ) from error
        raise RecordError(f"{raised}; mend the source, or leave these records out") from error
