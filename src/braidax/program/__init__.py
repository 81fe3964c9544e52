"""Traced single-device programs: what every strategy transforms, and the only place that touches JAX's internals."""

from .execute import compile_on as compile_on
from .marks import mark_gradient as mark_gradient
from .names import difference as difference
from .names import join as join
from .names import named_leaves as named_leaves
from .split import Origin as Origin
from .split import Part as Part
from .split import Split as Split
from .split import split_at_marks as split_at_marks
from .trace import Program as Program
from .trace import call_watched as call_watched
from .trace import spec_of as spec_of
from .trace import specs_of as specs_of
from .trace import trace as trace
