"""The poster: all of a study on one page of paper."""

from collections.abc import Mapping

from braidax.pictures.drawing import Drawing, Shape, Stroke, Words, moved
from braidax.tune.study.case import Case
from braidax.tune.study.design import Design
from braidax.tune.study.findings import Findings

from .charts import heat_map, stalls, sweep_chart
from .pdf import text_width
from .sentences import of_best, of_crossed, of_effect, of_hypothesis, of_predicted

_WIDTH, _HEIGHT, _EDGE, _RIGHT = 1190.0, 842.0, 36.0, 770.0  # A3, lying
_MAX_SWEEPS = 2


def poster(case: Case, design: Design, findings: Findings, facts: Mapping[str, str]) -> Drawing:
    """Returns the poster of a study: verdicts, where time goes, interactions and sweeps."""
    shapes: list[Shape] = [Words(_EDGE, 56, f"What overlaps with what: {case.title}", 27, is_bold=True)]
    told = "; ".join(f"{name}: {value}" for name, value in facts.items())
    y = _paragraph(shapes, told, _EDGE, 78, _WIDTH - 2 * _EDGE, size=9.5, role="faint") + 6
    for one in findings.hypotheses:
        if one.pair == "full" or len(findings.hypotheses) == 1:
            head = f"All on worse than the best single one? {of_hypothesis(one)}"
            y = _paragraph(shapes, head, _EDGE, y + 12, _WIDTH - 2 * _EDGE, size=13.5, role="accent") + 4
    shapes.append(Stroke(_EDGE, y, _WIDTH - _EDGE, y))
    top = y + 18
    crossed = [one for one in findings.timed if one.setting == design.levels.setting(one.setting.on)]
    bars = stalls(sorted(crossed, key=lambda one: one.seconds.value), width=_RIGHT - _EDGE - 40)
    shapes += moved(bars.shapes, _EDGE, top)
    below = top + bars.height + 14
    wide = (_RIGHT - _EDGE - 40) / _MAX_SWEEPS
    for at, each in enumerate([one for one in design.sweeps if not one.beside][:_MAX_SWEEPS]):
        chart = sweep_chart(each, findings, design, width=wide - 12)
        if below + chart.height < _HEIGHT - _EDGE:
            shapes += moved(chart.shapes, _EDGE + at * wide, below)
    heat = heat_map(findings, design.factors, cell=min(112.0, (_WIDTH - _EDGE - _RIGHT - 86) / len(design.factors)))
    shapes += moved(heat.shapes, _RIGHT, top)
    y = top + heat.height + 26
    others = [f"{one.pair}: {of_hypothesis(one)}" for one in findings.hypotheses if one.pair != "full"]
    told = [*map(of_effect, findings.effects), *of_crossed(findings), *of_predicted(findings)]
    for line in [of_best(findings, design), *told, *others]:
        if y > _HEIGHT - _EDGE - 30:
            shapes.append(Words(_RIGHT, y, "More is in report.html.", 9.5, role="faint"))
            break
        y = _paragraph(shapes, line, _RIGHT, y, _WIDTH - _EDGE - _RIGHT, size=9.5) + 5
    how = f"{design.num_blocks} randomized blocks of {len(design.settings)} settings; medians, intervals by ranks."
    shapes.append(Words(_EDGE, _HEIGHT - 22, f"braidax study. {how}", 9, role="faint"))
    return Drawing(f"What overlaps with what: {case.title}", _WIDTH, _HEIGHT, tuple(shapes))


def _paragraph(
    shapes: list[Shape], text: str, x: float, y: float, width: float, *, size: float, role: str = "text"
) -> float:
    """Adds lines that are as wide as there is room; returns where the next one would be."""
    line = ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and text_width(longer, size) > width:
            shapes.append(Words(x, y, line, size, role=role))
            line, y = word, y + 1.3 * size
        else:
            line = longer
    shapes.append(Words(x, y, line, size, role=role))
    return y + 1.3 * size
