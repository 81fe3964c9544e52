"""Parts of a source: its first samples, or several parts that have no sample in common."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

from braidax.data.sampling.permutation import Permutation
from braidax.data.source import Source, chosen_rows
from braidax.errors import ArgumentError

_EPOCH = -1  # of the order that is split: none of a loader's


def take(source: Source, num_samples: int) -> Source:
    """Returns a source of the first samples of another one; `source[:num_samples]` takes fewer where there are fewer.

    **Raises:** `ArgumentError` where there are not as many.
    """
    if not 1 <= num_samples <= len(source):
        raise ArgumentError(
            f"num_samples={num_samples!r}: expected 1 to {len(source):,}, the samples that the source has; "
            "source[:n] takes n, or all where there are fewer"
        )
    return source[:num_samples]


def split(
    source: Source,
    parts: float | Sequence[float | range | tuple[int, int]],
    *,
    seed: int | None = 0,
) -> tuple[Source, ...]:
    """Returns parts of a source that have no sample in common.

    The parts are a pure function of the arguments and the number of samples: the same in all processes and after any
    restart. None needs memory for its samples.

    **Arguments:** `parts`: fractions; a single one means that and the rest, `train, test = split(source, 0.9)`. They
    are drawn at random; what several leave over is in no part. Or ranges, as `range(0, 900)` or `(0, 900)`: of the
    source in its order. `seed`: of the draw; None cuts the source as it lies.

    **Raises:** `ArgumentError` for fractions that are more than all, a part without a sample, and ranges that overlap
    or lead beyond the source.
    """
    given = [parts, 1 - parts] if isinstance(parts, int | float) else list(cast("Sequence[Any]", parts))
    if not given:
        raise ArgumentError("parts= is empty; expected fractions, such as 0.9, or ranges, such as (0, 900)")
    if all(isinstance(part, int | float) for part in given):
        return _split_at_random(source, parts, [float(part) for part in given], seed)
    ranges = [_as_range(part) for part in given]
    _check_ranges(ranges, len(source))
    return tuple(chosen_rows(source, part) for part in ranges)


def _split_at_random(source: Source, parts: Any, fractions: list[float], seed: int | None) -> tuple[Source, ...]:
    if not all(0 < fraction < 1 for fraction in fractions) or math.fsum(fractions) > 1 + 1e-9:
        raise ArgumentError(
            f"parts={parts!r}: expected fractions above 0 whose sum is at most 1, such as 0.9 or (0.8, 0.1, 0.1)"
        )
    borders = [0, *(round(part * len(source)) for part in accumulate(fractions))]
    for number, (start, stop) in enumerate(pairwise(borders)):
        if start == stop:
            raise ArgumentError(
                f"parts={parts!r}: part {number} would have none of the {len(source)} samples; give it more, or leave "
                "it out"
            )
    order = None if seed is None else Permutation(len(source), seed=seed, epoch=_EPOCH)
    return tuple(chosen_rows(source, range(start, stop), order) for start, stop in pairwise(borders))


def _as_range(part: Any) -> range:
    if isinstance(part, range):
        return part
    if isinstance(part, tuple) and len(cast("tuple[Any, ...]", part)) == 2:
        start, stop = cast("tuple[int, int]", part)
        return range(start, stop)
    raise ArgumentError(
        f"parts= holds {part!r:.80}; expected fractions alone, or ranges alone, as range(0, 900) or (0, 900)"
    )


def _check_ranges(ranges: Sequence[range], num_samples: int) -> None:
    for part in ranges:
        if not len(part) or min(part[0], part[-1]) < 0 or max(part[0], part[-1]) >= num_samples:
            raise ArgumentError(
                f"parts= holds {part}; expected at least one sample, and none beyond the {num_samples:,} of the source"
            )
    for number, part in enumerate(ranges):
        for other in ranges[:number]:
            shared = _shared(part, other)
            if shared is not None:
                raise ArgumentError(
                    f"parts= holds {other} and {part}, which overlap: both have sample {shared}; expected ranges that "
                    "have none in common"
                )


def _shared(one: range, other: range) -> int | None:
    """Returns a sample that two ranges share, found by the shorter one."""
    few, many = sorted((one, other), key=len)
    if few.step in (1, -1) and many.step in (1, -1):
        first, last = max(min(few), min(many)), min(max(few), max(many))
        return first if first <= last else None
    return next((sample for sample in few if sample in many), None)
