"""Methods against each other, budget by budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allocmoe.artifacts import Method
from allocmoe.evaluation.quality import UNMODIFIED
from allocmoe.experiment.figures.lines import (
    Line,
    Panel,
    Point,
    budget_label,
    lines_plot,
    unit,
)
from allocmoe.experiment.grid import PlanName
from allocmoe.experiment.results import Difference, Measure, Results, Value
from allocmoe.experiment.tables import ABLATION, COMPARISONS, digits_of
from allocmoe.report.drawing import Plot, short

_PARTS = ("ablation", "Alloc-L, Alloc-T and both", tuple(ABLATION.values()))


def comparisons(results: Results) -> Iterator[Plot]:
    for key, title, methods in (*COMPARISONS, _PARTS):
        known = [
            (measure, values)
            for measure in (*results.groups, *results.texts)
            if (values := _known(results, measure, methods))
        ]
        caption = _ahead_line(methods[-1], known) + _bars_line(known)
        yield from lines_plot(
            key,
            title,
            caption,
            [_comparison(measure, values) for measure, values in known],
            along=budget_label(results),
            level=UNMODIFIED,
            xs=results.grid.budgets,
            columns=3,
        )


Known = dict[Method, dict[int, Value]]


def _known(results: Results, measure: Measure, methods: Sequence[Method]) -> Known:
    found: Known = {}
    for method in methods:
        for budget in results.grid.budgets:
            value = measure.of(PlanName(method, budget))
            if value is not None:
                found.setdefault(method, {})[budget] = value
    return found


def _comparison(measure: Measure, known: Known) -> Panel:
    digits, own = digits_of(measure), measure.of(None)
    lines = [
        Line(method, method, {budget: Point.of(v, digits) for budget, v in values.items()})
        for method, values in known.items()
    ]
    # of a rise it is 0 and would only press the lines together
    level = Point.of(own, digits) if own is not None and measure.higher_is_better else None
    better = "higher" if measure.higher_is_better else "lower"
    title = f"{short(measure.name, 20)}: {better} is better"
    log = not measure.higher_is_better
    return Panel(measure.name, title, unit(measure), lines, level, log=log)


def _ahead_line(ours: Method, known: Sequence[tuple[Measure, Known]]) -> str:
    """In how many settings our method is ahead of all others."""
    gaps: dict[str, list[Difference]] = {}
    for measure, lines in known:
        for budget, value in lines.get(ours, {}).items():
            others = [line[budget] for m, line in lines.items() if m != ours and budget in line]
            if others:
                compared = [measure.compare(value, other) for other in others]
                closest = min(compared, key=lambda gap: gap.better_by)
                gaps.setdefault(measure.name, []).append(closest)
    found = [gap for row in gaps.values() for gap in row]
    if not found:
        return f"{ours} has nothing to be compared with yet."
    each = [f"{name} {_won(row)} of {len(row)}" for name, row in gaps.items()]
    line = f"{ours} is ahead of all others in {_won(found)} of {len(found)} settings"
    if any(gap.noise is not None for gap in found):
        sure = sum(gap.noise is not None and gap.verdict == "ahead" for gap in found)
        line += f", in {sure} of them beyond the noise"
    return f"{line} ({'; '.join(each)})."


def _won(gaps: Sequence[Difference]) -> int:
    return sum(gap.better_by > 0 for gap in gaps)


def _bars_line(known: Sequence[tuple[Measure, Known]]) -> str:
    """What the bars are: of scores and of rises they differ."""
    values = [v for _, lines in known for row in lines.values() for v in row.values() if v.spread]
    kinds = {
        "the standard error that the items leave": any(len(v.samples) == 1 for v in values),
        "the standard deviation over seeds": any(len(v.samples) > 1 for v in values),
    }
    return f" Bars: {' or '.join(kind for kind in kinds if kinds[kind])}." if values else ""
