"""Plots per MoE layer: the sensitivity matrix, and the layer budgets of the plans."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

from allocmoe.artifacts import Plan, Sensitivity
from allocmoe.report.drawing import (
    Plot,
    Theme,
    colour,
    load_matplotlib,
    method_rank,
    panels,
    short,
)
from allocmoe.report.gather import Bundle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# the methods whose layer budgets are also read off evaluations
_FROM_EVALUATIONS = ("alloc-moe", "alloc-l", "uniform")
Budgets = tuple[float, ...]
# names of the plans that are the same by layer -> (method, activations per token of each layer)
Lines = dict[tuple[str, ...], tuple[str, Budgets]]
_HATCHES = (None, "////", "....", "xxxx")
_MOST_PLANS = 2 * len(_HATCHES)  # in a panel: more could not be told apart


def sensitivity_plots(bundle: Bundle) -> list[Plot]:
    return [
        _heat_map(f"sensitivity-{number}", path, sensitivity)
        for number, (path, sensitivity) in enumerate(bundle.of(Sensitivity), start=1)
    ]


def _heat_map(key: str, path: str, sensitivity: Sensitivity) -> Plot:
    ks = sorted({k for row in sensitivity.ks for k in row})
    cells = [
        dict(zip(grid, row, strict=True))
        for grid, row in zip(sensitivity.ks, sensitivity.cost("log"), strict=True)
    ]
    largest = max(max(row.values()) for row in cells)

    def draw(figure: Figure, theme: Theme) -> None:
        _draw_heat_map(figure.subplots(), theme, cells, ks, largest if largest > 0 else 1.0)

    return Plot(
        key=key,
        section="sensitivity",
        title=f"Sensitivity in the context {sensitivity.context.name}, token rule "
        f"{sensitivity.token.label} ({path})",
        caption=_sensitivity_line(cells)
        + " The colour follows the root of the value, so that small ones can be told apart.",
        columns=("MoE layer", *(f"k={k:g}" for k in ks)),
        rows=tuple(
            (str(layer), *(f"{row[k]:+z.4f}" if k in row else "" for k in ks))
            for layer, row in enumerate(cells)
        ),
        size=(min(9.0, 3.6 + 0.9 * len(ks)), 1.1 + 0.34 * len(cells)),
        draw=draw,
    )


def _draw_heat_map(
    ax: Axes, theme: Theme, cells: list[dict[float, float]], ks: list[float], largest: float
) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    colours = load_matplotlib().colormaps[theme.heat]
    for layer, row in enumerate(cells):
        for k, value in row.items():
            tone = colours(math.sqrt(max(value, 0.0) / largest))
            corner = (ks.index(k) - 0.5, layer - 0.5)
            ax.add_patch(Rectangle(corner, 1, 1, facecolor=tone, edgecolor=theme.paper))
            light = 0.299 * tone[0] + 0.587 * tone[1] + 0.114 * tone[2] > 0.5
            ink = "#10151b" if light else "#ffffff"
            ax.text(
                ks.index(k), layer, f"{value:z.3f}", color=ink, ha="center", va="center", size=9
            )
    ax.set_xlim(-0.5, len(ks) - 0.5)
    ax.set_ylim(len(cells) - 0.5, -0.5)
    ax.set_xticks(range(len(ks)), [f"{k:g}" for k in ks])
    step = -(-len(cells) // 32)
    ax.set_yticks(range(0, len(cells), step))
    ax.grid(False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xlabel("k (activations per token in the layer)")
    ax.set_ylabel("MoE layer")
    ax.set_title("log S(layer, k) - log S(layer, k_orig), in nats per token")
    # up to 50 shades stay vectors; more would become an embedded picture
    shades = ScalarMappable(Normalize(0, 1), colours.resampled(40))
    bar: Any = ax.figure.colorbar(shades, ax=ax, fraction=0.05, pad=0.02)
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    bar.set_ticks(shares, labels=[f"{largest * share**2:.2g}" for share in shares])
    bar.solids.set_edgecolor("face")  # no seams between the shades
    bar.outline.set_visible(False)


def _sensitivity_line(cells: list[dict[float, float]]) -> str:
    worst = [max(row.values()) for row in cells]
    at = [max(row, key=lambda k: row[k]) for row in cells]
    most, least = worst.index(max(worst)), worst.index(min(worst))
    line = (
        f"MoE layer {most} suffers most from fewer experts ({worst[most]:+z.3f} at "
        f"k={at[most]:g}), layer {least} least ({worst[least]:+z.3f} at k={at[least]:g})."
    )
    middle = statistics.median(worst)
    if middle > 0 and worst[most] / middle >= 2:
        line += f" The first is {worst[most] / middle:.1f} times the median layer."
    return line


def budget_plots(bundle: Bundle) -> list[Plot]:
    found = _layer_budgets(bundle)
    if not found:
        return []
    num_layers, most = len(bundle.model.k_orig), max(bundle.model.k_orig)

    def draw(figure: Figure, theme: Theme) -> None:
        axes = panels(figure, len(found), 1)
        for ax, (budget, lines) in zip(axes, found.items(), strict=True):
            _draw_budgets(ax, theme, budget, _drawn(lines), most)
        axes[-1].set_xlabel("MoE layer")

    return [
        Plot(
            key="layer-budgets",
            section="layer budgets",
            title="Layer budgets of the plans",
            caption=" ".join(
                (_budget_line(found), "The dashed line is the even split.", *_left_out(found))
            ),
            columns=("budget", "plan", *(f"layer {layer}" for layer in range(num_layers))),
            rows=tuple(
                (f"{budget:g}", ", ".join(names), *(f"{b:g}" for b in budgets))
                for budget, lines in found.items()
                for names, (_, budgets) in lines.items()
            ),
            size=(9.0, 0.5 + 2.3 * len(found)),
            draw=draw,
        )
    ]


def _layer_budgets(bundle: Bundle) -> dict[float, Lines]:
    """The plans at each budget, those with the same layer budgets as one.

    Plans come first; an evaluation stands in for plans that are not in the folder.
    """
    names: dict[tuple[float, Budgets], dict[str, str]] = {}
    plans = bundle.of(Plan)
    have = Counter((plan.method, float(plan.budget)) for _, plan in plans)
    for path, plan in plans:
        key = (float(plan.budget), plan.layer_budgets)
        # the file is named only where the method and the budget do not tell
        alone = have[plan.method, float(plan.budget)] == 1
        label = plan.method if alone else f"{plan.method} ({path})"
        names.setdefault(key, {})[label] = plan.method
    for _, rows in bundle.measured():
        for q in (row.quality for row in rows):
            if q.method in _FROM_EVALUATIONS and (q.method, q.budget) not in have:
                rounded = tuple(round(value, 2) for value in q.realised_per_layer)
                names.setdefault((q.budget, rounded), {})[q.name] = q.method
    found: dict[float, Lines] = {}
    order = sorted(
        names.items(),
        key=lambda item: (-item[0][0], method_rank(min(item[1].values(), key=method_rank))),
    )
    for (budget, budgets), labels in order:
        method = min(labels.values(), key=method_rank)
        found.setdefault(budget, {})[tuple(labels)] = (method, budgets)
    return found


def _drawn(lines: Lines) -> Lines:
    """The plans for which there is room: the first of every method, then the second of each."""
    count: Counter[str] = Counter()
    turns = {}
    for names, (method, _) in lines.items():
        turns[names] = count[method]
        count[method] += 1
    chosen = sorted(lines, key=lambda names: turns[names])[:_MOST_PLANS]
    return {names: line for names, line in lines.items() if names in chosen}


def _left_out(found: dict[float, Lines]) -> list[str]:
    return [
        f"At {budget:g}, {len(lines) - _MOST_PLANS} of {len(lines)} different plans are "
        "not drawn; the table has them all."
        for budget, lines in found.items()
        if len(lines) > _MOST_PLANS
    ]


def _draw_budgets(ax: Axes, theme: Theme, budget: float, lines: Lines, most: int) -> None:
    width = 0.8 / len(lines)
    num_layers = len(next(iter(lines.values()))[1])
    tones: dict[str, int] = {}
    for place, (names, (method, budgets)) in enumerate(lines.items()):
        repeat = tones[method] = tones.get(method, -1) + 1
        ax.bar(
            [layer - 0.4 + (place + 0.5) * width for layer in range(num_layers)],
            budgets,
            width=0.92 * width,
            label=_legend_label(names),
            # plans of one method share its colour: every other is paler, and pairs are hatched
            color=colour(theme, method, place),
            alpha=0.55 if repeat % 2 else 1.0,
            hatch=_HATCHES[repeat // 2],
            edgecolor=theme.paper,
            linewidth=0.4,
        )
    ax.axhline(budget / num_layers, color=theme.ink, linewidth=1, linestyle="--")
    ax.set_ylim(0, most)
    ax.set_xlim(-0.6, num_layers - 0.4)
    ax.set_xticks(range(0, num_layers, -(-num_layers // 32)))
    ax.grid(False, axis="x")
    ax.set_ylabel("activations per token")
    ax.set_title(f"budget {budget:g}")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)


def _legend_label(names: tuple[str, ...]) -> str:
    label = ", ".join(names)
    if len(names) == 1 or len(label) <= 44:
        return short(label, 44)
    # cut in its middle, a list would read like one name
    return f"{short(names[0], 34)} and {len(names) - 1} more"


def _budget_line(found: dict[float, Lines]) -> str:
    lines = []
    for budget, plans in found.items():
        for method, budgets in plans.values():
            if method.startswith("alloc-") and len(set(budgets)) > 1:
                most, least = max(budgets), min(budgets)
                lines.append(
                    f"At {budget:g}, {method} gives the most to layer {budgets.index(most)} "
                    f"({most:g}) and the least to layer {budgets.index(least)} ({least:g})."
                )
                break
    return " ".join(lines) or "No plan here departs from the even split by layer."
