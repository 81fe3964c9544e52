"""Which line of the user's own code an equation comes from."""

import re
import sysconfig
from pathlib import Path

import jax
from jax.extend.core import Jaxpr
from jax.extend.source_info_util import SourceInfo, summarize

_FRAME = re.compile(r"^(?P<file>.+?):(?P<line>\d+)(?::\d+)? \(")
_FOLDERS = (
    *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")),
    Path(jax.__file__).parent,
    Path(__file__).parent.parent,
)
_LIBRARIES = tuple(
    {str(path) for folder in _FOLDERS for path in (folder, folder.resolve())}
)  # an environment may be a link


def line_of(source: SourceInfo) -> str:
    """Returns `file:line` of the innermost frame that belongs to no library; of the innermost of all if all do.

    **Arguments:** `source`: of an equation. **Returns:** the line, or `""` when the equation has no traceback.
    """
    frames = [match for text in summarize(source, num_frames=100).splitlines() if (match := _FRAME.match(text))]
    own = [frame for frame in frames if not is_library(frame["file"])]
    return next((f"{frame['file']}:{frame['line']}" for frame in reversed(own or frames)), "")


def is_library(file: str) -> bool:
    """Whether a file is part of an installed package, or of this one."""
    return file.startswith(_LIBRARIES)


def comes_from_library(jaxpr: Jaxpr) -> bool:
    """Whether a jitted function is a library's. JAX shares its trace: inner lines may be those of another call."""
    _, _, place = jaxpr.debug_info.func_src_info.partition(" at ")
    return is_library(place)
