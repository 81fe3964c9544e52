"""`predict_time`, `predict_memory`, `rank`: what a search says of candidates before it compiles any, beside what the
compiler says and the clock."""

import statistics
from collections.abc import Callable

import braidax as bx
from benchmarks.harness import Report, models, say
from braidax.errors import ArgumentError
from braidax.tasks.bert_model import Sizes
from braidax.tune import Found
from braidax.tune.control.comparing import compare

_TRIED, _TOP = 5, 3


def _losses(*, quick: bool) -> list[Callable[[], models.Model]]:
    """Returns what makes the losses: of words, a recommender, layers of attention, images."""
    tiny = Sizes(1000, 32, width=32, num_layers=2, num_heads=2, dropout=0.0)
    if quick:
        return [lambda: models.bert(8, tiny)]
    return [
        lambda: models.bert(16, tiny),
        lambda: models.lm1b(2_000, 32, 16),
        lambda: models.lm1b(20_000, 16, 64),
        lambda: models.dlrm(1_000, 64),
        lambda: models.resnet((1, 1, 1, 1), 32, 8),
    ]


def measure_searched(report: Report, *, quick: bool) -> None:
    """Searches for several losses on the devices that are here, and compares what was predicted of what was tried."""
    slower, larger, right = list[float](), list[float](), list[float]()
    for make in _losses(quick=quick):
        model = make()
        say(model.name)
        try:
            found = bx.plan(
                model.loss, model.optimizer, init=model.init, batch=model.spec, measure=2 if quick else _TRIED
            )
        except ArgumentError as error:
            report.missing(f"search, {model.name}", "predicted", str(error))
            continue
        _add(report, f"search, {model.name}", found)
        timed = [one for one in found.tried if one.seconds]
        predicted = found.ranked.predicted
        slower += [abs(float(predicted.seconds[one.at]) / (one.seconds or 1) - 1) for one in timed]
        built = [one for one in found.tried if one.memory_bytes]
        larger += [abs(float(predicted.memory_bytes[one.at]) / (one.memory_bytes or 1) - 1) for one in built]
        right.append(float(_is_in_top(found)))
    report.at_most("predict_time", statistics.median(slower), 0.15)
    report.at_most("predict_memory", statistics.median(larger), 0.05)
    report.at_least("rank", statistics.mean(right), 0.8)


def _is_in_top(found: Found) -> bool:
    """Whether one of the first that were predicted is the fastest that was measured, or no slower beyond the noise."""
    top = [one for one in found.tried if one.at in found.ranked.order[:_TOP] and one.taken]
    return any(not compare(one.taken, found.tried[0].taken).is_beyond_noise for one in top)


def _add(report: Report, case: str, found: Found) -> None:
    predicted = found.ranked.predicted
    for one in found.tried:
        at = found.ranked.name(one.at)
        if one.seconds is None or one.memory_bytes is None:
            report.missing(case, "measured", one.why, at=at)
            continue
        report.add(case, "predicted", "time", "s", [float(predicted.seconds[one.at])], at=at)
        report.add(case, "measured", "time", "s", one.taken, at=at)
        report.add(case, "predicted", "memory of a device", "MB", [float(predicted.memory_bytes[one.at]) / 1e6], at=at)
        report.add(case, "compiled", "memory of a device", "MB", [one.memory_bytes / 1e6], at=at)
