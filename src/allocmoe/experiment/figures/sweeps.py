"""How much better another K_base, calibration text or context is."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allocmoe.experiment.figures.lines import (
    Line,
    Panel,
    Point,
    budget_label,
    by,
    lines_plot,
)
from allocmoe.experiment.grid import K_BASE, PlanName
from allocmoe.experiment.results import Measure, Results, Value
from allocmoe.experiment.tables import (
    calibration_plans,
    context_plans,
    digits_of,
    k_base_plans,
    swept,
)
from allocmoe.report.drawing import Plot

_MEAN = "mean of the budgets"


def k_base(results: Results) -> Iterator[Plot]:
    plans, known = k_base_plans(results), []
    for _, measure in swept(results):
        lines = _k_base_lines(measure, plans)
        if lines:
            known.append((measure, lines))
    yield from _sweep(
        "k-base",
        "K_base of Alloc-T on uniform layers",
        " ".join(_k_base_caption(measure, lines) for measure, lines in known),
        known,
        against=f"K_base = {K_BASE}",
        along="K_base",
        xs=[*map(int, plans)],
    )


def _k_base_lines(measure: Measure, plans: Mapping[str, Sequence[PlanName]]) -> list[Line]:
    """Against K_BASE: on average, and at every budget in grey."""
    base = plans.get(str(K_BASE), ())
    rows = {_MEAN: {name: measure.over(row) for name, row in plans.items()}}
    for place, plan in enumerate(base):
        rows[str(plan.budget)] = {name: measure.of(row[place]) for name, row in plans.items()}
    lines = []
    for shape, (label, values) in zip(" osD^vP<>X", rows.items(), strict=False):
        points = _gaps(measure, values, dict.fromkeys(values, values.get(str(K_BASE))))
        # K_BASE against itself is no line
        if len(points) > 1:
            by_k: dict[float, Point] = {int(name): point for name, point in points.items()}
            lines.append(Line(label, "alloc-t" if label == _MEAN else "", by_k, shape.strip()))
    return lines


def _gaps(
    measure: Measure, ones: Mapping[Any, Value | None], others: Mapping[Any, Value | None]
) -> dict[Any, Point]:
    """How much better each is than its other, with what noise leaves open."""
    found, digits = {}, digits_of(measure)
    for name, one in ones.items():
        other = others[name]
        if one is not None and other is not None:
            gap = measure.compare(one, other)
            # nothing is noise between a plan and itself
            noise = 0.0 if one is other else gap.noise or 0.0
            text = f"{gap.better_by:+z.{digits}f}" + (f" ±{noise:.{digits}f}" if noise else "")
            found[name] = Point(gap.better_by, text, noise, noise)
    return found


def _k_base_caption(measure: Measure, lines: Sequence[Line]) -> str:
    points = next((line.points for line in lines if line.label == _MEAN), None)
    if points is None:
        return f"Not every budget is measured by the {measure.name}."
    best, second = sorted(points, key=lambda k: -points[k].y)[:2]
    # differences are known against K_BASE
    other, gap = (second, points[second]) if best == K_BASE else (K_BASE, points[best])
    noise = f" (noise {by(measure, gap.up)})" if gap.up else ""
    return (
        f"By the {measure.name} K_base = {best} is best over all budgets, "
        f"{by(measure, abs(gap.y))} better than {other}{noise}."
    )


def calibration(results: Results) -> Iterator[Plot]:
    plans = calibration_plans(results)
    yield from _over_uniform(results, "calibration", "The calibration text of Alloc-L", plans)


def contexts(results: Results) -> Iterator[Plot]:
    title = "What the other layers do while one is profiled"
    yield from _over_uniform(results, "context", title, context_plans(results))


def _over_uniform(
    results: Results, key: str, title: str, plans: Mapping[str, Sequence[PlanName]]
) -> Iterator[Plot]:
    known = []
    for _, measure in swept(results):
        uniform = {b: measure.of(PlanName("uniform", b)) for b in results.grid.budgets}
        lines = []
        for index, (name, row) in enumerate(plans.items()):
            points = _gaps(measure, {plan.budget: measure.of(plan) for plan in row}, uniform)
            # what the other comparisons show has the colour that it has there
            shown = "" if row[0].text or row[0].context else row[0].method
            if points:
                lines.append(Line(name, shown, points, index=index - 1))
        if lines:
            known.append((measure, lines))
    yield from _sweep(
        key,
        title,
        " ".join(_gain_caption(measure, lines) for measure, lines in known),
        known,
        against="uniform",
        along=budget_label(results),
        xs=results.grid.budgets,
    )


def _gain_caption(measure: Measure, lines: Sequence[Line]) -> str:
    budgets = set.intersection(*({*line.points} for line in lines))
    if not budgets:
        return f"No budget is measured for every line by the {measure.name}."
    means = {line.label: statistics.fmean(line.points[b].y for b in budgets) for line in lines}
    ends = dict.fromkeys((max(means, key=means.__getitem__), min(means, key=means.__getitem__)))
    found = " and ".join(f"{by(measure, means[name], '+')} with {name}" for name in ends)
    return f"By the {measure.name} the gain over Uniform is {found}."


def _sweep(
    key: str,
    title: str,
    caption: str,
    known: Sequence[tuple[Measure, Sequence[Line]]],
    *,
    against: str,
    along: str,
    xs: Sequence[int],
) -> Iterator[Plot]:
    bars = any(p.up for _, lines in known for line in lines for p in line.points.values())
    found = [
        Panel(
            measure.name,
            f"{measure.name}: higher is better",
            f"better than {against} by ({'points' if measure.higher_is_better else 'nats'})",
            lines,
            level=Point(0.0, ""),
        )
        for measure, lines in known
    ]
    caption += " Bars: what noise leaves open, 95 %." if bars else ""
    yield from lines_plot(key, title, caption, found, along=along, level=against, xs=xs)
