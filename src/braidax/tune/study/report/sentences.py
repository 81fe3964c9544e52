"""What a study has found, in sentences made of its numbers."""

from braidax.tune.study.design import Design
from braidax.tune.study.findings import Effect, Findings, Hypothesis
from braidax.tune.study.statistics import Estimate

from .charts import interval, milliseconds

_WORDS = {"confirmed": "Confirmed", "refuted": "Refuted", "undecided": "Undecided"}


def surety(one: Estimate) -> str:
    """Returns how sure an interval is, such as `97 %`."""
    return f"{100 * one.coverage:.0f} %"


def of_hypothesis(one: Hypothesis) -> str:
    """Returns the verdict on "all on is worse than the best single one" of an experiment."""
    value = one.difference.value
    way = "slower" if value > 0 else "faster"
    return (
        f"{_WORDS[one.verdict]}: all on is {milliseconds(abs(value))} ms a step ({abs(one.percent):.1f} %) {way} than "
        f"{one.best} alone; interval {interval(one.difference)} ms at {surety(one.difference)}."
    )


def of_effect(one: Effect) -> str:
    """Returns what a factor does, alone and beside the others."""
    told = f"{one.factor}: {one.verdict}. Alone {_change(one.alone)}"
    if one.with_others is not None:
        told += f"; with all others on {_change(one.with_others)}"
    return f"{told}."


def of_crossed(findings: Findings) -> list[str]:
    """Returns the pairs whose interaction is no accident, the strongest first."""
    sure = [one for one in findings.crossed if one.alone.sign != "undecided"]
    sure.sort(key=lambda one: -abs(one.alone.value))
    found = [
        f"{one.factors[0]} and {one.factors[1]} are {one.verdict}: both on take {_change(one.alone)} "
        "than the sum of what each changes."
        for one in sure
    ]
    left = len(findings.crossed) - len(sure)
    others = f"{left} other pairs" if sure else f"all {left} pairs"
    return [*found, f"Of {others} the interval of the interaction holds 0."] if left > 1 else found


def of_predicted(findings: Findings) -> list[str]:
    """Returns of how many interactions the sign was predicted; of none where none is sure."""
    sure = [one for one in findings.crossed if one.held != "undecided"]
    if not sure:
        return []
    told = ", ".join(
        f"{one.factors[0]} and {one.factors[1]} {milliseconds(one.predicted.seconds)} ms"
        + (f", but it is {milliseconds(one.alone.value)}" if one.held == "missed" else "")
        for one in sure
    )
    held = sum(one.held == "held" for one in sure)
    return [
        f"From the runs of each factor alone the sign of {held} of {len(sure)} interactions that are no accident was "
        f"predicted: {told}."
    ]


def of_best(findings: Findings, design: Design) -> str:
    """Returns which of the crossed settings is the fastest, and which with checkpoints."""
    usual = {design.levels.setting(one.setting.on) for one in findings.timed}
    timed = sorted((one for one in findings.timed if one.setting in usual), key=lambda one: one.seconds.value)
    told = f"Fastest: {timed[0].label}, {milliseconds(timed[0].seconds.value)} ms a step"
    saved = next((one for one in timed if one.setting.checkpoint_every is not None), None)
    if saved is not None:
        told += f"; with checkpoints: {saved.label}, {milliseconds(saved.seconds.value)} ms"
    return f"{told}. Slowest: {timed[-1].label}, {milliseconds(timed[-1].seconds.value)} ms."


def _change(one: Estimate) -> str:
    way = "more" if one.value > 0 else "less"
    return f"{milliseconds(abs(one.value))} ms {way} a step ({interval(one)} at {surety(one)})"
