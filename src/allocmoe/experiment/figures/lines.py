"""Lines in panels, which most figures are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allocmoe.experiment.results import Measure, Results, Value
from allocmoe.experiment.tables import (
    NOTHING,
    digits_of,
    show,
)
from allocmoe.report.drawing import (
    Plot,
    Theme,
    colour,
    marker,
    panel_size,
    panels,
    plain_log_axis,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SECTION = "figures"
PUBLISHED = "alloc-moe, the paper's"


@dataclass(frozen=True)
class Point:
    """A number, as a table shows it, and how far its bar reaches down and up."""

    y: float
    text: str
    down: float = 0.0
    up: float = 0.0

    @classmethod
    def of(cls, value: Value, digits: int) -> Point:
        bar = value.spread or 0.0
        return cls(value.mean, show(value, digits), bar, bar)


@dataclass(frozen=True)
class Line:
    """The points that are known, by their place on the x axis. A line with a shape of its own is
    grey, as it only stands beside the others; `index` tells unknown methods apart."""

    label: str
    method: str
    points: Mapping[float, Point]
    shape: str = ""
    index: int = 0

    @property
    def has_bars(self) -> bool:
        return not self.shape and any(p.down or p.up for p in self.points.values())

    def draw(self, ax: Axes, theme: Theme, shift: float = 0.0) -> None:
        """shift: of the bars, beside their points."""
        ours = self.method.startswith("alloc-")
        tone = theme.muted if self.shape else colour(theme, self.method, self.index)
        xs, ys = [*self.points], [point.y for point in self.points.values()]
        ax.plot(
            xs,
            ys,
            label=short(self.label),
            color=tone,
            marker=self.shape or marker(self.method, self.index),
            markersize=7.5 if ours else 6,
            markeredgecolor=theme.paper,
            markeredgewidth=0.6,
            linewidth=2.4 if ours else 1.1,
            linestyle="-" if ours else (0, (4, 2)),
            zorder=4 if ours else 3,
        )
        if self.has_bars:
            bars = [(point.down, point.up) for point in self.points.values()]
            ax.errorbar(
                [x + shift for x in xs],
                ys,
                yerr=[*zip(*bars, strict=True)],
                fmt="none",
                ecolor=tone,
                elinewidth=0.9,
                capsize=2,
                zorder=2.5,
            )


@dataclass(frozen=True)
class Panel:
    """level: a thin line across. published: the paper's numbers. log: if they span decades."""

    name: str
    title: str
    unit: str
    lines: Sequence[Line]
    level: Point | None = None
    published: Line | None = None
    log: bool = False

    def draw(self, ax: Axes, theme: Theme, level: str, step: float) -> None:
        """step: how far apart the bars of one place stand, lest they cover each other."""
        barred = [line.label for line in self.lines if line.has_bars]
        for line in self.lines:
            shift = barred.index(line.label) - (len(barred) - 1) / 2 if line.has_bars else 0.0
            line.draw(ax, theme, step * shift)
        if self.level is not None:
            ax.axhline(self.level.y, color=theme.ink, linewidth=0.9, label=level, zorder=2)
        if self.published is not None:
            look: dict[str, Any] = dict(color="none", markeredgecolor=theme.ink, markersize=13)
            for x, point in self.published.points.items():
                ax.plot(x, point.y, "*", label=self.published.label, zorder=5, **look)
        ys = [point.y for line in self.lines for point in line.points.values()]
        if self.log and min(ys) > 0 and max(ys) / min(ys) > 15:
            ax.set_yscale("log")
            plain_log_axis(ax.yaxis, ys)
            # a bar that reaches down to 0 would take the axis with it
            ax.set_ylim(bottom=min(ys) / 1.8)
        ax.set_title(self.title)
        ax.set_ylabel(self.unit)

    def rows(self, xs: Sequence[int], level: str) -> Iterator[tuple[str, ...]]:
        if self.level is not None and self.level.text:
            yield (self.name, level, *[self.level.text] * len(xs))
        for line in (*self.lines, *([self.published] if self.published else [])):
            cells = (line.points[x].text if x in line.points else NOTHING for x in xs)
            yield (self.name, line.label, *cells)


def lines_plot(
    key: str,
    title: str,
    caption: str,
    found: Sequence[Panel],
    *,
    along: str,
    level: str,
    xs: Sequence[int],
    columns: int = 2,
) -> Iterator[Plot]:
    """One plot of the panels, if there are any. along: the x axis. level: what their levels are."""
    if not found:
        return

    def draw(figure: Figure, theme: Theme) -> None:
        axes = panels(figure, len(found), columns)
        width = max(xs) - min(xs)
        margin = 0.07 * width or 0.5
        for ax, panel in zip(axes, found, strict=True):
            panel.draw(ax, theme, level, 0.014 * width)
            ax.set_xticks(sorted(xs))
            ax.set_xlim(min(xs) - margin, max(xs) + margin)
        draw_legend(figure, axes, 6)
        figure.supxlabel(along, size=10.5)

    yield Plot(
        key=key,
        section=SECTION,
        title=title,
        caption=caption,
        columns=("panel", "line", *map(str, xs)),
        rows=tuple(row for panel in found for row in panel.rows(xs, level)),
        size=panel_size(len(found), columns, 2.6 if columns > 2 else 3.1),
        draw=draw,
    )


def draw_legend(figure: Figure, axes: Sequence[Axes], ncols: int) -> None:
    """Above the panels, with the lines of all of them."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend([*found.values()], [*found], loc="outside upper left", ncols=ncols)


def budget_label(results: Results) -> str:
    return f"budget (activations a token; unmodified: {sum(results.info.k_orig)})"


def at_half(results: Results) -> str:
    return f"{results.grid.half} of {sum(results.info.k_orig)} activations"


def unit(measure: Measure) -> str:
    return "score (%)" if measure.higher_is_better else "rise of log-perplexity (nats)"


def by(measure: Measure, number: float, sign: str = "") -> str:
    """A difference in words."""
    unit = "points" if measure.higher_is_better else "nats"
    return f"{number:{sign}.{digits_of(measure)}f} {unit}"
