"""What Alloc-MoE at half the budget does to layers, experts and tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from allocmoe.evaluation.quality import UNMODIFIED
from allocmoe.experiment.figures.lines import (
    SECTION,
    Line,
    Point,
    at_half,
    draw_legend,
)
from allocmoe.experiment.grid import PlanName
from allocmoe.experiment.results import Results
from allocmoe.report.drawing import (
    Plot,
    Theme,
    panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# where the paper looks closer: at the 10th of 26 MoE layers
_DEPTH = 9 / 25


def _closer_layer(num_layers: int) -> int:
    return round(_DEPTH * (num_layers - 1))


def expert_load(results: Results) -> Iterator[Plot]:
    if not results.analyses:
        return
    analysis, seed = results.analyses[0], results.analysed_seeds[0]
    number = _closer_layer(len(analysis.layers))
    layer, k = analysis.layers[number], results.info.k_orig[number]
    kept = analysis.realised_per_layer[number]
    order = sorted(range(len(layer.load_before)), key=lambda e: -layer.load_before[e])
    # shares of the layer's activations become how often an expert runs
    before = [100 * k * layer.load_before[e] for e in order]
    after = [100 * kept * layer.load_after[e] for e in order]

    def draw(figure: Figure, theme: Theme) -> None:
        ax = figure.subplots()
        ranks, ours = range(1, len(order) + 1), theme.colours["alloc-moe"]
        ax.bar(ranks, before, 0.86, color=theme.muted, alpha=0.45, label=f"{UNMODIFIED} (k = {k})")
        ax.bar(ranks, after, 0.5, color=ours, label=f"alloc-moe ({kept:.2f} a token)")
        ax.set_xlim(0.3, len(order) + 0.7)
        ax.grid(False, axis="x")
        ax.set_xlabel("experts, most loaded first (rank in the unmodified model)")
        ax.set_ylabel("tokens of 100 that run it")
        draw_legend(figure, [ax], 2)

    yield Plot(
        key="expert-load",
        section=SECTION,
        title=f"Expert load in MoE layer {number}",
        caption=f"In MoE layer {number} (of 0 to {len(analysis.layers) - 1}) at "
        f"{at_half(results)} an expert runs for {statistics.fmean(after):.1f} instead of "
        f"{statistics.fmean(before):.1f} of 100 tokens, the busiest for {max(after):.1f} instead "
        f"of {max(before):.1f}; their order is kept with a rank correlation of "
        f"{layer.spearman:.3f}." + (f" Seed {seed} alone." if results.settings.seeds > 1 else ""),
        columns=("expert", "unmodified, of 100 tokens", "alloc-moe, of 100 tokens"),
        rows=tuple(
            (str(expert), f"{one:.2f}", f"{other:.2f}")
            for expert, one, other in zip(order, before, after, strict=True)
        ),
        size=(9.0, 3.6),
        draw=draw,
    )


def load_balance(results: Results) -> Iterator[Plot]:
    if not results.analyses:
        return
    layers = [*zip(*(analysis.layers for analysis in results.analyses), strict=True)]
    order = [statistics.fmean(x.spearman for x in seeds) for seeds in layers]
    fall = [statistics.fmean(x.entropy_before - x.entropy_after for x in seeds) for seeds in layers]
    shift = [statistics.fmean(x.js_divergence for x in seeds) for seeds in layers]

    def draw(figure: Figure, theme: Theme) -> None:
        left = figure.subplots()
        right = left.twinx()
        for ax, method, label, values in (
            (left, "alloc-l", "rank correlation (left)", order),
            (right, "alloc-moe", "fall of the entropy (right)", fall),
            (right, "alloc-t", "JS divergence (right)", shift),
        ):
            Line(label, method, {x: Point(y, "") for x, y in enumerate(values)}).draw(ax, theme)
        right.grid(False)
        right.set_ylim(bottom=min(0.0, right.get_ylim()[0]))
        right.spines["right"].set_visible(True)
        left.set_xticks(range(0, len(layers), -(-len(layers) // 32)))
        left.set_xlabel("MoE layer")
        left.set_ylabel("Spearman's rank correlation")
        right.set_ylabel("normalised entropy; nats")
        draw_legend(figure, [left, right], 3)

    seeds = len(results.analyses)
    yield Plot(
        key="load-balance",
        section=SECTION,
        title="Expert load of every MoE layer against the unmodified model's",
        caption=f"At {at_half(results)} the order of the experts by load is kept with a rank "
        f"correlation of {min(order):.3f} (layer {order.index(min(order))}) to {max(order):.3f}. "
        f"The normalised entropy of the load falls by {min(fall):.4f} to {max(fall):.4f}; the "
        f"Jensen-Shannon divergence is at most {max(shift):.4f} (layer {shift.index(max(shift))})."
        + (f" Means of {seeds} seeds." if seeds > 1 else ""),
        columns=("MoE layer", "rank correlation", "fall of the entropy", "JS divergence (nats)"),
        rows=tuple(
            (str(number), f"{one:.4f}", f"{two:.4f}", f"{three:.5f}")
            for number, (one, two, three) in enumerate(zip(order, fall, shift, strict=True))
        ),
        size=(9.0, 3.8),
        draw=draw,
    )


def layers_and_tokens(results: Results) -> Iterator[Plot]:
    """Layer budgets come with the plans, tokens with the analyses: either may be missing."""
    names = [PlanName("alloc-moe", results.grid.half, s) for s in range(results.settings.seeds)]
    split = {name.seed: plan.layer_budgets for name in names if (plan := results.plan(name))}
    number = _closer_layer(len(results.info.k_orig))
    kept = [analysis.layers[number].kept_by_entropy for analysis in results.analyses]
    drawers: list[Callable[[Axes, Theme], None]] = []
    if split:
        drawers.append(lambda ax, theme: _draw_layers(ax, theme, results, [*split.values()]))
    if any(kept):
        drawers.append(lambda ax, theme: _draw_tokens(ax, theme, results, number))
    if not drawers:
        return

    def draw(figure: Figure, theme: Theme) -> None:
        for drawer, ax in zip(drawers, panels(figure, len(drawers), 2), strict=True):
            drawer(ax, theme)

    yield Plot(
        key="layers-and-tokens",
        section=SECTION,
        title=f"Where alloc-moe spends {at_half(results)}",
        caption=" ".join([*_layers_line([*split.values()]), *_tokens_line(results, number)]),
        columns=("what", "seed", "place", "experts a token"),
        rows=(
            *(
                ("layer budget", str(seed), f"layer {layer}", f"{budget:g}")
                for seed, row in split.items()
                for layer, budget in enumerate(row)
            ),
            *(
                ("kept", str(seed), f"layer {number}, entropy {row[0]:.4f}", f"{row[1]:.4f}")
                for seed, bins in zip(results.analysed_seeds, kept, strict=True)
                for row in bins
            ),
        ),
        size=(9.0, 3.8),
        draw=draw,
    )


def _draw_layers(ax: Axes, theme: Theme, results: Results, split: list[tuple[float, ...]]) -> None:
    places, even = range(len(split[0])), results.grid.half / len(split[0])
    ax.bar(places, _means(split), 0.8, color=theme.colours["alloc-moe"], alpha=0.75)
    for row in split if len(split) > 1 else ():
        ax.plot(places, row, "_", color=theme.ink, markersize=6, zorder=4)
    ax.axhline(even, color=theme.ink, linewidth=1, linestyle="--")
    ax.set_ylim(0, 1.03 * max(results.info.k_orig))
    ax.set_xticks(places[:: -(-len(places) // 14)])
    ax.grid(False, axis="x")
    ax.set_xlabel("MoE layer")
    ax.set_ylabel("layer budget (experts a token)")
    ax.set_title("(a) layers; dashed: the even split")


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def _draw_tokens(ax: Axes, theme: Theme, results: Results, number: int) -> None:
    for analysis in results.analyses:
        bins = analysis.layers[number].kept_by_entropy
        Line("", "alloc-t", {row[0]: Point(row[1], "") for row in bins}).draw(ax, theme)
    mean = statistics.fmean(a.realised_per_layer[number] for a in results.analyses)
    ax.axhline(mean, color=theme.ink, linewidth=1, linestyle="--")
    ax.set_xlabel("entropy of the token's routing (nats)")
    ax.set_ylabel("experts kept a token")
    ax.set_title(f"(b) tokens in layer {number}; dashed: their mean")


def _layers_line(split: Sequence[Sequence[float]]) -> Iterator[str]:
    means = _means(split)
    middle = len(means) // 2
    if middle:
        first, second = statistics.fmean(means[:middle]), statistics.fmean(means[-middle:])
        yield (
            f"(a) The first half of the layers gets {first:.2f} experts a token and layer, the "
            f"second {second:.2f}; layer {means.index(max(means))} gets the most "
            f"({max(means):.2f}), layer {means.index(min(means))} the least ({min(means):.2f})."
        )
        if len(split) > 1:
            yield "Strokes are seeds, the columns their mean."


def _tokens_line(results: Results, number: int) -> Iterator[str]:
    layers = [analysis.layers[number] for analysis in results.analyses]
    known = [
        (layer.kept_by_entropy[0][1], layer.kept_by_entropy[-1][1], layer.entropy_correlation)
        for layer in layers
        if layer.kept_by_entropy and layer.entropy_correlation is not None
    ]
    if known:
        low, high, correlation = _means(known)
        yield (
            f"(b) In layer {number} the most decided tenth of the tokens keeps {low:.2f} experts, "
            f"the least decided {high:.2f}; the rank correlation with the entropy is "
            f"{correlation:.2f}."
        )
        if len(layers) > 1:
            yield f"Lines are seeds, the numbers means of {len(known)}."
