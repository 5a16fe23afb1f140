"""How fast plans are, and what they cost at that speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from allocmoe.artifacts import Method, Timing
from allocmoe.evaluation.quality import UNMODIFIED
from allocmoe.experiment.figures.lines import (
    PUBLISHED,
    SECTION,
    Line,
    Panel,
    Point,
    at_half,
    budget_label,
    by,
    draw_legend,
    lines_plot,
    unit,
)
from allocmoe.experiment.grid import PlanName
from allocmoe.experiment.results import Measure, Results, Value
from allocmoe.experiment.tables import (
    digits_of,
    show,
)
from allocmoe.report.drawing import (
    Plot,
    Theme,
    colour,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Timed = dict[Method, dict[int, tuple[float, Timing]]]


def speedup(results: Results) -> Iterator[Plot]:
    stages: dict[str, Timed] = {"prefill": {}, "decode": {}}
    for method in results.settings.timed:
        for budget in results.grid.budgets:
            speed = results.speed(PlanName(method, budget))
            if speed is not None:
                prefill, decode = speed.prefill[0], speed.decode
                stages["prefill"].setdefault(method, {})[budget] = (prefill.speedup, prefill.time)
                stages["decode"].setdefault(method, {})[budget] = (decode.speedup, decode.step)
    found = [
        Panel(
            stage,
            stage,
            "times as fast",
            [
                Line(method, method, {budget: _timed(*row) for budget, row in values.items()})
                for method, values in timed.items()
            ],
            level=Point(1.0, "1.000"),
            published=_published_line(results, stage),
        )
        for stage, timed in stages.items()
        if timed
    ]
    yield from lines_plot(
        "speedup",
        "Times as fast as the unmodified model",
        _speedup_line(results, stages),
        found,
        along=budget_label(results),
        level=UNMODIFIED,
        xs=results.grid.budgets,
    )


def _published_line(results: Results, stage: str) -> Line | None:
    number = results.model.published.speedup.get(stage)
    if number is None:
        return None
    return Line(PUBLISHED, "", {results.grid.half: Point(number, f"{number:.2f}")})


def _timed(speedup: float, timing: Timing) -> Point:
    """The bar runs from the slowest to the fastest run."""
    slowest, fastest = timing.median_ms / timing.max_ms, timing.median_ms / timing.min_ms
    return Point(speedup, f"{speedup:.3f}", speedup * (1 - slowest), speedup * (fastest - 1))


def _speedup_line(results: Results, stages: Mapping[str, Timed]) -> str:
    half, published = results.grid.half, results.model.published.speedup
    parts = []
    for stage, timed in stages.items():
        found = [f"{method} {row[half][0]:.2f}" for method, row in timed.items() if half in row]
        if stage in published:
            found.append(f"the paper's alloc-moe {published[stage]:.2f}")
        if found:
            parts.append(f"{stage} {', '.join(found)}")
    text = f"At {at_half(results)}: {'; '.join(parts)}. " if parts else ""
    return f"{text}Bars: from the slowest to the fastest run."


# quality by speedup
Traded = dict[Method, dict[int, tuple[float, Value]]]


def trade_off(results: Results) -> Iterator[Plot]:
    """By the first measure that has any point."""
    for _, measure in results.overall:
        found: Traded = {}
        for method in ("uniform", "alloc-moe"):
            for budget in results.grid.budgets:
                plan = PlanName(method, budget)
                speed, value = results.speed(plan), measure.of(plan)
                if speed is not None and value is not None:
                    found.setdefault(method, {})[budget] = (speed.decode.speedup, value)
        if found:
            yield _trade_off_plot(results, measure, found)
            return


def _trade_off_plot(results: Results, measure: Measure, found: Traded) -> Plot:
    own, full, digits = measure.of(None), sum(results.info.k_orig), digits_of(measure)
    sign = 1.0 if measure.higher_is_better else -1.0

    def draw(figure: Figure, theme: Theme) -> None:
        ax = figure.subplots()
        if own is not None:
            ax.axhline(sign * own.mean, color=theme.ink, linewidth=0.9, zorder=2)
            label = f"{UNMODIFIED} ({full})"
            ax.plot(1, sign * own.mean, "*", color=theme.ink, markersize=13, label=label, zorder=5)
        for method, row in found.items():
            spreads = [(x, sign * v.mean, v.spread or 0.0) for x, v in row.values()]
            points = {x: Point(y, "", spread, spread) for x, y, spread in spreads}
            Line(method, method, points).draw(ax, theme)
            for budget, (x, value) in row.items():
                _annotate(ax, theme, method, str(budget), x, sign * value.mean)
        ax.margins(0.06, 0.12)
        ax.set_xlabel("decode, times as fast as the unmodified model")
        ax.set_ylabel(f"{measure.name} (%)" if sign > 0 else f"minus the {unit(measure)}")
        ax.set_title("Up and to the right is better; the numbers are budgets")
        draw_legend(figure, [ax], 3)

    return Plot(
        key="trade-off",
        section=SECTION,
        title="Quality against speed",
        caption=_trade_off_line(results, measure, found),
        columns=("method", "budget", "decode speedup", f"{measure.name}: {unit(measure)}"),
        rows=(
            (UNMODIFIED, str(full), "1.000", show(own, digits)),
            *(
                (method, str(budget), f"{speedup:.3f}", show(value, digits))
                for method, row in found.items()
                for budget, (speedup, value) in row.items()
            ),
        ),
        size=(9.0, 4.6),
        draw=draw,
    )


def _annotate(ax: Axes, theme: Theme, method: str, text: str, x: float, y: float) -> None:
    """Ours above the line, the other's below."""
    ours = method.startswith("alloc-")
    ax.annotate(
        text,
        (x, y),
        xytext=(8, 7) if ours else (-8, -7),
        textcoords="offset points",
        ha="left" if ours else "right",
        va="bottom" if ours else "top",
        color=colour(theme, method),
        bbox=dict(facecolor=theme.paper, edgecolor="none", pad=0.5),
    )


def _trade_off_line(results: Results, measure: Measure, found: Traded) -> str:
    own, half = measure.of(None), results.grid.half
    parts = []
    for method, row in found.items():
        if half in row and own is not None:
            speedup, value = row[half]
            change = by(measure, measure.compare(value, own).better_by, "+")
            parts.append(f"{method} decodes {speedup:.2f} times as fast for {change}")
    text = f"At {at_half(results)} {' and '.join(parts)}. " if parts else ""
    return f"{text}Quality is the {measure.name}."
