"""Plots of analyses: expert load, tokens against entropy, sweeps."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from allocmoe.artifacts import Analysis, LayerAnalysis, SweepRow
from allocmoe.report.drawing import Plot, Theme, panel_size, panels, short
from allocmoe.report.gather import Bundle, text_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4


def analysis_plots(bundle: Bundle) -> list[Plot]:
    plots = []
    for number, (path, analysis) in enumerate(bundle.of(Analysis), start=1):
        what = f"{analysis.name}, {analysis.method} at budget {analysis.budget} ({path})"
        if analysis.layers:
            plots.append(_load(f"load-{number}", what, analysis))
            plots.append(_entropy(f"entropy-{number}", what, analysis))
        for key, over, rows in (
            ("k-base", "k_base", analysis.k_base_sweep),
            ("text", "the calibration text", analysis.text_sweep),
        ):
            if rows:
                plots.append(_sweep(f"sweep-{key}-{number}", over, what, rows))
    order = ("expert load", "tokens and entropy", "sweeps")
    return sorted(plots, key=lambda plot: order.index(plot.section))


def _load(key: str, what: str, analysis: Analysis) -> Plot:
    layers = analysis.layers

    def draw(figure: Figure, theme: Theme) -> None:
        axes = panels(figure, len(layers), _COLUMNS)
        tops = [100 * max(*x.load_before, *x.load_after) for x in layers]
        # one scale for all, unless one layer would press the others flat
        shared = max(tops) <= 3 * statistics.median(tops)
        for index, (ax, layer) in enumerate(zip(axes, layers, strict=True)):
            _draw_load(ax, theme, index, layer)
            ax.set_ylim(0, 1.05 * (max(tops) if shared else tops[index]))
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2)
        figure.supxlabel("experts, most loaded first (rank in the unmodified model)", size=10.5)
        # in one line it would reach the legend of a figure with one row
        figure.supylabel("share of the layer's\nactivations (%)", size=10.5, ma="center")

    low = min(range(len(layers)), key=lambda index: layers[index].spearman)
    shift = statistics.fmean(x.entropy_after - x.entropy_before for x in layers)
    far = max(range(len(layers)), key=lambda index: layers[index].js_divergence)
    return Plot(
        key=key,
        section="expert load",
        title=f"Expert load before and after {what}",
        caption=f"On {text_label(analysis.text)}. The order of the experts by load is kept with a "
        f"rank correlation r of at least {layers[low].spearman:z.3f} (layer {low}); the normalised "
        f"entropy H of the load changes by {shift:+z.4f} on average; the loads differ most in "
        f"layer {far} (Jensen-Shannon divergence {layers[far].js_divergence:.4f} nats).",
        columns=(
            "MoE layer",
            "Spearman",
            "entropy before",
            "after",
            "JSD (nats)",
            "load before, by expert (%)",
            "load after, by expert (%)",
        ),
        rows=tuple(
            (
                str(index),
                f"{x.spearman:z.4f}",
                f"{x.entropy_before:.4f}",
                f"{x.entropy_after:.4f}",
                f"{x.js_divergence:.5f}",
                " ".join(f"{100 * share:.2f}" for share in x.load_before),
                " ".join(f"{100 * share:.2f}" for share in x.load_after),
            )
            for index, x in enumerate(layers)
        ),
        size=panel_size(len(layers), _COLUMNS, 1.9),
        draw=draw,
    )


def _draw_load(ax: Axes, theme: Theme, index: int, layer: LayerAnalysis) -> None:
    from matplotlib.ticker import MaxNLocator

    order = sorted(range(len(layer.load_before)), key=lambda e: -layer.load_before[e])
    ranks = range(1, len(order) + 1)
    ax.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=(1, 2, 5, 10)))
    before = [100 * layer.load_before[e] for e in order]
    after = [100 * layer.load_after[e] for e in order]
    ax.fill_between(ranks, before, step="mid", color=theme.muted, alpha=0.35, label="before")
    ax.step(
        ranks, after, where="mid", color=theme.colours["alloc-moe"], linewidth=1.5, label="after"
    )
    change = layer.entropy_after - layer.entropy_before
    ax.set_title(
        f"layer {index}: r {layer.spearman:z.2f}\nΔH {change:+z.3f}, JSD {layer.js_divergence:.3f}",
        size=9.5,
    )


def _entropy(key: str, what: str, analysis: Analysis) -> Plot:
    layers = analysis.layers

    def draw(figure: Figure, theme: Theme) -> None:
        axes = panels(figure, len(layers), _COLUMNS)
        kept = [[row[1] for row in x.kept_by_entropy] for x in layers]
        span = max((max(values) - min(values) for values in kept if values), default=0.0)
        half = 0.6 * max(span, 0.1)
        for index, (ax, layer, values) in enumerate(zip(axes, layers, kept, strict=True)):
            entropies = [row[0] for row in layer.kept_by_entropy]
            ax.plot(entropies, values, "o-", color=theme.colours["alloc-l"], markersize=4)
            if values:
                middle = (max(values) + min(values)) / 2
                ax.set_ylim(middle - half, middle + half)
            ax.axhline(
                analysis.realised_per_layer[index], color=theme.muted, linewidth=1, linestyle="--"
            )
            ax.set_title(f"layer {index}: r {_correlation(layer)}", size=9.5)
        figure.supxlabel("entropy of the token's routing (nats)", size=10.5)
        figure.supylabel("experts kept per token", size=10.5)

    return Plot(
        key=key,
        section="tokens and entropy",
        title=f"Experts kept against the entropy of the routing, {what}",
        caption=f"On {text_label(analysis.text)}, each dot a tenth of the tokens; all panels span "
        "the same number of experts, the dashed line is the layer's mean. " + _entropy_line(layers),
        columns=("MoE layer", "correlation", "mean entropy (nats)", "experts kept", "tokens"),
        rows=tuple(
            (str(index), _correlation(x), f"{row[0]:.4f}", f"{row[1]:.4f}", f"{row[2]:g}")
            for index, x in enumerate(layers)
            for row in x.kept_by_entropy
        ),
        size=panel_size(len(layers), _COLUMNS, 1.8),
        draw=draw,
    )


def _correlation(layer: LayerAnalysis) -> str:
    value = layer.entropy_correlation
    return "none" if value is None else f"{value:+z.2f}"


def _entropy_line(layers: tuple[LayerAnalysis, ...]) -> str:
    known = [x.entropy_correlation for x in layers if x.entropy_correlation is not None]
    if not known:
        return "Every token keeps the same number of experts, so there is no correlation."
    more, fewer = sum(value > 0.1 for value in known), sum(value < -0.1 for value in known)
    return (
        f"The rank correlation r runs from {min(known):+z.2f} to {max(known):+z.2f}: above +0.1, "
        f"so that uncertain tokens keep more experts, in {more} of {len(known)} layers, and below "
        f"-0.1 in {fewer}."
    )


def _sweep(key: str, over: str, what: str, rows: tuple[SweepRow, ...]) -> Plot:
    best = min(rows, key=lambda row: row.log_rise)
    worst = max(rows, key=lambda row: row.log_rise)

    def draw(figure: Figure, theme: Theme) -> None:
        ax = figure.subplots()
        for place, row in enumerate(rows):
            tone = theme.colours["alloc-moe"] if row is best else theme.muted
            ax.barh(place, row.log_rise, height=0.6, color=tone)
            ax.annotate(
                f"{row.log_rise:+z.4f}",
                (max(row.log_rise, 0.0), place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                size=9.5,
            )
        ax.axvline(0, color=theme.muted, linewidth=1)
        ax.margins(x=0.12)
        ax.grid(False, axis="y")
        ax.set_yticks(range(len(rows)), [short(row.value, 40) for row in rows])
        ax.invert_yaxis()
        ax.set_ylabel(over.removeprefix("the "))
        ax.set_xlabel("rise of the log-perplexity (nats per token)")
        ax.set_title(f"Quality over {over}: lower is better")

    return Plot(
        key=key,
        section="sweeps",
        title=f"Sweep over {over}: {what}",
        caption=f"Best is {best.value} ({best.log_rise:+z.4f}), worst {worst.value} "
        f"({worst.log_rise:+z.4f}): a spread of {worst.log_rise - best.log_rise:.4f}.",
        columns=(over.removeprefix("the "), "log rise", "perplexity", "realised", "layer budgets"),
        rows=tuple(
            (
                row.value,
                f"{row.log_rise:+z.4f}",
                f"{row.perplexity:.3f}",
                f"{row.realised:.2f}",
                " ".join(f"{b:g}" for b in row.layer_budgets),
            )
            for row in rows
        ),
        size=(9.0, 1.3 + 0.42 * len(rows)),
        draw=draw,
    )
