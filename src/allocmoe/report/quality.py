"""Plots of evaluations: what a budget costs, and who keeps to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from allocmoe.artifacts import Quality
from allocmoe.report.drawing import (
    Plot,
    Theme,
    colour,
    marker,
    method_rank,
    plain_log_axis,
    short,
)
from allocmoe.report.gather import Bundle, Measured, best_within_budget, text_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNMODIFIED = "unmodified"
Series = dict[str, list[Quality]]
# of the second and further token rules of a method: marker and dashes
_RULE_LOOKS = (("X", (0, (3, 1.2))), ("d", (0, (1, 1))), ("p", (0, (4, 1, 1, 1))))


def quality_plots(bundle: Bundle) -> list[Plot]:
    plots = []
    for number, (text, rows) in enumerate(bundle.measured(), start=1):
        changed = [row for row in rows if row.quality.method != UNMODIFIED]
        if changed:
            where = text_label(text)
            plots.append(_quality(f"quality-{number}", where, changed, bundle.full_budget))
            plots.append(_spending(f"spending-{number}", where, changed))
    return sorted(plots, key=lambda plot: plot.section != "quality")


def by_budget(rows: Sequence[Measured]) -> dict[float, list[Measured]]:
    """Largest budget first; without the unmodified model."""
    changed = [row for row in rows if row.quality.method != UNMODIFIED]
    budgets = sorted({row.quality.budget for row in changed}, reverse=True)
    return {b: [row for row in changed if row.quality.budget == b] for b in budgets}


def _series(rows: Sequence[Measured]) -> Series:
    """One series a method, or one a method and token rule where a method has several rules."""
    qualities = sorted((r.quality for r in rows), key=lambda q: (method_rank(q.method), q.token))
    rules = {(q.method, q.token) for q in qualities}
    series: Series = {}
    for q in qualities:
        several = sum(method == q.method for method, _ in rules) > 1
        label = f"{q.method} ({q.token})" if several else q.method
        series.setdefault(label, []).append(q)
    return series


def _lowest(points: Sequence[Quality]) -> list[Quality]:
    """Of each budget the row with the lowest rise."""
    budgets = sorted({q.budget for q in points})
    return [min((q for q in points if q.budget == b), key=lambda q: q.log_rise) for b in budgets]


def _quality(key: str, where: str, rows: list[Measured], full: int) -> Plot:
    series = _series(rows)
    # a rule looks the same under every method that has several
    rules = sorted({q[0].token for label, q in series.items() if label != q[0].method})
    spare = any(len(_lowest(points)) < len(points) for points in series.values())

    def draw(figure: Figure, theme: Theme) -> None:
        ax = figure.subplots()
        for index, (label, points) in enumerate(series.items()):
            rule = rules.index(points[0].token) if label != points[0].method else 0
            _draw_series(ax, theme, index, rule, label, points)
        _scale_rise(ax, [q.log_rise for points in series.values() for q in points])
        ax.set_xlabel(f"realised activations per token, all MoE layers (unmodified: {full})")
        ax.set_ylabel("rise of the log-perplexity (nats per token)")
        ax.set_title("Quality against budget: lower is better")
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", labelspacing=0.7)

    return Plot(
        key=key,
        section="quality",
        title=f"Quality against budget on {where}",
        caption=" ".join(_best_lines(rows, full))
        + (
            " Where a method has several plans at a budget, the line joins the best of them and "
            "the others are hollow."
            if spare
            else ""
        ),
        columns=("plan", "method", "token rule", "budget", "realised", "log rise", "perplexity"),
        rows=tuple(
            (
                q.name,
                q.method,
                q.token,
                f"{q.budget:g}",
                f"{q.realised:.2f}",
                f"{q.log_rise:+z.4f}",
                f"{q.perplexity:.3f}",
            )
            for points in series.values()
            for q in points
        ),
        size=(9.0, 5.0),
        draw=draw,
    )


def _draw_series(
    ax: Axes, theme: Theme, index: int, rule: int, label: str, points: list[Quality]
) -> None:
    method = points[0].method
    ours = method.startswith("alloc-")
    tone = colour(theme, method, index)
    # the token rules of one method share its colour
    shape, dashes = (
        _RULE_LOOKS[(rule - 1) % len(_RULE_LOOKS)]
        if rule
        else (marker(method, index), "-" if ours else (0, (4, 2)))
    )
    line = _lowest(points)
    ax.plot(
        [q.realised for q in line],
        [q.log_rise for q in line],
        label=short(label),
        color=tone,
        marker=shape,
        markersize=7.5 if ours else 6.5,
        markeredgecolor=theme.paper,
        markeredgewidth=0.6,
        linewidth=2.4 if ours else 1.1,
        linestyle=dashes,
        zorder=4 if ours else 3,
    )
    rest = [q for q in points if q not in line]
    ax.plot(
        [q.realised for q in rest],
        [q.log_rise for q in rest],
        color=tone,
        marker=shape,
        markersize=6,
        markerfacecolor="none",
        linestyle="none",
        zorder=5,
    )


def _scale_rise(ax: Axes, values: list[float]) -> None:
    low, high = min(values), max(values)
    if low > 0 and high / low > 15:
        ax.set_yscale("log")
        plain_log_axis(ax.yaxis, values)
    else:
        ax.axhline(0, color="0.5", linewidth=0.8)


def _best_lines(rows: Sequence[Measured], full: int) -> list[str]:
    lines = []
    for budget, at in by_budget(rows).items():
        best = best_within_budget(at)
        if best is None:
            lines.append(f"At {budget:g} of {full} activations no plan keeps to the budget.")
            continue
        q = best.quality
        line = f"At {budget:g} of {full} activations {q.name} is best ({q.log_rise:+z.4f}"
        uniform = [r.quality.log_rise for r in at if r.quality.method == "uniform"]
        if uniform and q.method != "uniform":
            line += f", uniform {min(uniform):+z.4f}"
        lines.append(line + ").")
    return lines


def _spending(key: str, where: str, rows: list[Measured]) -> Plot:
    series = _series(rows)
    budgets = sorted({row.quality.budget for row in rows}, reverse=True)
    shapes = dict(zip(budgets, "osD^vP<>X*" * len(budgets), strict=False))

    def draw(figure: Figure, theme: Theme) -> None:
        ax = figure.subplots()
        ax.axvline(0, color=theme.muted, linewidth=1.2)
        for place, points in enumerate(series.values()):
            tone = colour(theme, points[0].method, place)
            spread = max(len(budgets) - 1, 1)
            for q in points:
                # budgets of one method lie beside each other
                height = place + 0.6 * (budgets.index(q.budget) / spread - 0.5)
                ax.plot(_excess(q), height, shapes[q.budget], color=tone, markersize=6)
            ax.axhline(place + 0.5, color=theme.grid, linewidth=0.8)
        for budget in budgets:
            ax.plot([], [], shapes[budget], color=theme.ink, label=f"{budget:g}")
        ax.grid(False, axis="y")
        ax.set_yticks(range(len(series)), [short(label) for label in series])
        ax.set_ylim(len(series) - 0.5, -0.5)
        widest = max(0.5, *(abs(_excess(r.quality)) for r in rows))
        ax.set_xlim(-1.15 * widest, 1.15 * widest)
        ax.set_xlabel("realised over asked activations per token (%)")
        ax.set_title("Left of the line: below the budget. Right of it: overspent")
        figure.legend(
            *ax.get_legend_handles_labels(), loc="outside right upper", title="asked budget"
        )

    return Plot(
        key=key,
        section="spending",
        title=f"Realised activations against the asked budget on {where}",
        caption=_spending_line(rows),
        columns=("plan", "method", "asked", "realised", "difference"),
        rows=tuple(
            (q.name, q.method, f"{q.budget:g}", f"{q.realised:.3f}", f"{_excess(q):+z.2f} %")
            for points in series.values()
            for q in points
        ),
        size=(9.0, 1.4 + 0.14 * (len(budgets) + 1) * len(series)),
        draw=draw,
    )


def _excess(q: Quality) -> float:
    return 100 * (q.realised / q.budget - 1) if q.budget else 0.0


def _spending_line(rows: Sequence[Measured]) -> str:
    over = [row.quality for row in rows if _excess(row.quality) > 0.5]
    if not over:
        return "Every plan keeps to its budget within half a percent."
    most = max(over, key=_excess)
    methods = ", ".join(sorted({q.method for q in over}, key=method_rank))
    return (
        f"More than half a percent over the budget: {methods}. The most is {most.name} with "
        f"{most.realised:.2f} instead of {most.budget:g} ({_excess(most):+z.1f} %)."
    )
