from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from allocmoe.artifacts import ModelInfo
from allocmoe.experiment.figures import make_figures
from allocmoe.experiment.grid import KINDS, Cell, PlanName
from allocmoe.experiment.results import Results
from allocmoe.report.drawing import LIGHT, THEMES, Plot, Theme, render
from experiment_results import (
    STDERR,
    TINY,
    layer_budgets,
    make_results,
    rise,
    score,
    speedup,
    tiny_settings,
)

pytest.importorskip("matplotlib", reason="figures need matplotlib")
from matplotlib.figure import Figure

BUDGETS = (13, 10, 8, 5)
HALF = 8
KEYS = [
    "trade-off",
    "main",
    "alloc-l",
    "alloc-t",
    "ablation",
    "speedup",
    "expert-load",
    "load-balance",
    "layers-and-tokens",
    "k-base",
    "calibration",
]


def figures(results: Results) -> dict[str, Plot]:
    return {plot.key: plot for plot in make_figures(results)}


@pytest.fixture(scope="module")
def whole() -> Results:
    return make_results()


@pytest.fixture(scope="module")
def plots(whole: Results) -> dict[str, Plot]:
    return figures(whole)


def row_of(plot: Plot, *start: str) -> tuple[str, ...]:
    (row,) = (row for row in plot.rows if row[: len(start)] == start)
    return row[len(start) :]


def check(plot: Plot) -> None:
    """Whatever is missing, a figure has something to show, and drawing it does not fail."""
    assert plot.rows
    assert all(len(row) == len(plot.columns) for row in plot.rows)
    assert plot.caption.endswith(".")
    assert "nan" not in plot.caption
    plot.draw(Figure(figsize=plot.size), LIGHT)


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_every_figure_is_made_and_can_be_drawn(plots: dict[str, Plot], theme: Theme) -> None:
    assert [*plots] == KEYS
    for plot in plots.values():
        check(plot)
        assert plot.size[0] == 9
        assert render(plot, theme, "svg").startswith(b"<?xml")


def test_rises_come_with_their_spread_over_seeds(plots: dict[str, Plot]) -> None:
    assert plots["main"].columns[2:] == tuple(map(str, BUDGETS))
    for method in ("uniform", "alloc-moe"):
        cells = row_of(plots["main"], "C4, other part", method)
        for budget, cell in zip(BUDGETS, cells, strict=True):
            rises = [rise(TINY, PlanName(method, budget), text=1, seed=seed) for seed in range(2)]
            assert cell == f"{statistics.fmean(rises):.4f} ±{statistics.stdev(rises):.4f}"


def test_scores_come_in_percent_with_the_error_of_their_items(plots: dict[str, Plot]) -> None:
    # the tasks of Reasoning are the third and the fourth
    own = 100 * statistics.fmean(score(TINY, None, task) for task in (2, 3))
    error = 100 * STDERR / 2**0.5
    assert row_of(plots["main"], "Reasoning", "unmodified")[0] == f"{own:.2f} ±{error:.2f}"
    plan = PlanName("alloc-t", HALF)
    found = 100 * statistics.fmean(score(TINY, plan, task) for task in (2, 3))
    cell = row_of(plots["alloc-t"], "Reasoning", "alloc-t")[BUDGETS.index(HALF)]
    assert cell == f"{found:.2f} ±{error:.2f}"
    assert {row[1] for row in plots["alloc-l"].rows} == {
        "unmodified",
        "uniform",
        "ascending",
        "descending",
        "lexi",
        "alloc-l",
    }


def test_captions_count_the_settings(plots: dict[str, Plot]) -> None:
    assert "alloc-moe is ahead of all others in 20 of 20 settings, in " in plots["main"].caption
    assert "(NLU 4 of 4; Reasoning 4 of 4; Math 4 of 4;" in plots["main"].caption
    assert "standard deviation over seeds" in plots["main"].caption


def test_speedups_and_the_papers(plots: dict[str, Plot]) -> None:
    gains = [speedup(TINY, PlanName("lexi", budget)) for budget in BUDGETS]
    assert row_of(plots["speedup"], "decode", "lexi") == tuple(f"{gain:.3f}" for gain in gains)
    assert row_of(plots["speedup"], "prefill", "lexi")[0] == f"{(1 + gains[0]) / 2:.3f}"
    published = row_of(plots["speedup"], "decode", "alloc-moe, the paper's")
    assert published == ("-", "-", "1.34", "-")


def test_the_trade_off_is_of_tasks_or_else_of_texts(plots: dict[str, Plot]) -> None:
    own = speedup(TINY, PlanName("alloc-moe", HALF))
    gain = f"{own:.3f}"
    tasks = [100 * score(TINY, PlanName("alloc-moe", HALF), task) for task in range(6)]
    found, value = row_of(plots["trade-off"], "alloc-moe", str(HALF))
    assert (found, value.partition(" ")[0]) == (gain, f"{statistics.fmean(tasks):.2f}")
    texts = figures(make_results(tiny_settings(seeds=1, tasks=False)))["trade-off"]
    rises = [rise(TINY, PlanName("alloc-moe", HALF), text) for text in range(2)]
    assert row_of(texts, "alloc-moe", str(HALF)) == (gain, f"{statistics.fmean(rises):.4f}")
    assert f"alloc-moe decodes {own:.2f} times as fast for -0.0" in texts.caption


def test_the_load_is_that_of_the_papers_depth(whole: Results, plots: dict[str, Plot]) -> None:
    plot, analysis = plots["expert-load"], whole.analyses[0]
    assert "In MoE layer 1 (of 0 to 3)" in plot.caption
    layer, kept = analysis.layers[1], analysis.realised_per_layer[1]
    assert len(plot.rows) == TINY.num_experts[1]
    for expert, before, after in plot.rows:
        # 4 of 8 experts ran for every token
        assert before == f"{400 * layer.load_before[int(expert)]:.2f}"
        assert after == f"{100 * kept * layer.load_after[int(expert)]:.2f}"
    loads = [float(before) for _, before, _ in plot.rows]
    assert loads == sorted(loads, reverse=True)
    paper = replace(TINY, k_orig=(6,) * 26, num_experts=(64,) * 26)
    assert "In MoE layer 9 (of 0 to 25)" in figures(make_results(info=paper))["expert-load"].caption


def test_load_balance_is_the_mean_over_seeds(whole: Results, plots: dict[str, Plot]) -> None:
    layers = [analysis.layers[3] for analysis in whole.analyses]
    assert len(layers) == 2
    assert row_of(plots["load-balance"], "3") == (
        f"{statistics.fmean(layer.spearman for layer in layers):.4f}",
        f"{layers[0].entropy_before - layers[0].entropy_after:.4f}",
        f"{layers[0].js_divergence:.5f}",
    )


def test_layers_and_tokens_of_every_seed(whole: Results, plots: dict[str, Plot]) -> None:
    plot = plots["layers-and-tokens"]
    for seed in range(2):
        found = [row[3] for row in plot.rows if row[:2] == ("layer budget", str(seed))]
        budgets = layer_budgets(TINY, PlanName("alloc-moe", HALF, seed))
        assert found == [f"{budget:g}" for budget in budgets]
    kept = [row for row in plot.rows if row[:2] == ("kept", "0")]
    assert len(kept) == 10
    entropy, experts, _ = whole.analyses[0].layers[1].kept_by_entropy[0]
    assert kept[0][2:] == (f"layer 1, entropy {entropy:.4f}", f"{experts:.4f}")


def test_sweeps_are_differences(plots: dict[str, Plot]) -> None:
    settings = tiny_settings(seeds=1, tasks=False)
    sweeps = figures(make_results(settings))

    def mean(plan: PlanName) -> float:
        return statistics.fmean(rise(TINY, plan, text) for text in range(2))

    cells = row_of(sweeps["k-base"], "mean of the texts", str(HALF))
    gaps = [
        mean(PlanName("alloc-t", HALF)) - mean(PlanName("alloc-t", HALF, k_base=k))
        for k in range(4)
    ]
    assert cells == tuple(f"{gap:+z.4f}" for gap in gaps)
    assert "K_base = 1 is best over all budgets" in sweeps["k-base"].caption
    gain = mean(PlanName("uniform", HALF)) - mean(PlanName("alloc-l", HALF, text=2))
    row = row_of(sweeps["calibration"], "mean of the texts", settings.calibration.texts[2].name)
    assert row[BUDGETS.index(HALF)] == f"{gain:+.4f}"
    both = replace(settings.calibration, contexts=("paper", "single"))
    plot = figures(make_results(replace(settings, calibration=both)))["context"]
    for method, context in (("alloc-l", 0), ("alloc-moe", 1)):
        plan = PlanName(method, HALF, context=context)  # type: ignore[arg-type]
        row = row_of(plot, "mean of the texts", f"{method}, {both.contexts[context]}")
        gain = mean(PlanName("uniform", HALF)) - mean(plan)
        assert row[BUDGETS.index(HALF)] == f"{gain:+.4f}"
    # with seeds and items the noise stands beside
    cells = row_of(plots["k-base"], "mean of the groups", "mean of the budgets")
    assert [" ±" in cell for cell in cells] == [True, False, True, True]


def test_nothing_finished_is_no_figure() -> None:
    assert make_figures(make_results(keep=lambda cell: False)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_without_one_kind_of_cell_the_rest_is_drawn(kind: str) -> None:
    found = figures(make_results(keep=lambda cell: cell.kind != kind))
    left_out = {"speed": {"trade-off", "speedup"}, "analysis": {"expert-load", "load-balance"}}
    assert {*KEYS} - {*found} == left_out.get(kind, set())
    for plot in found.values():
        check(plot)


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_of_cell_is_drawn_alone(kind: str) -> None:
    for plot in make_figures(make_results(keep=lambda cell: cell.kind == kind)):
        check(plot)


def test_an_unfinished_experiment_is_drawn_as_far_as_it_goes() -> None:
    def keep(cell: Cell) -> bool:
        # every other of them
        return sum(map(ord, cell.id)) % 2 == 0 or cell.kind == "speed"

    results = make_results(tiny_settings(seeds=1), keep=keep)
    found = figures(results)
    assert found
    for plot in found.values():
        check(plot)
    only = make_results(keep=lambda cell: cell.kind == "text" and cell.budget == HALF)
    for key, plot in figures(only).items():
        check(plot)
        if key in ("main", "alloc-l", "alloc-t", "calibration"):
            assert {row[2 + BUDGETS.index(5)] for row in plot.rows} == {"-"}
            assert "-" not in {row[2 + BUDGETS.index(HALF)] for row in plot.rows}


def test_fewer_methods_and_no_published_speed() -> None:
    settings = replace(tiny_settings(), methods=("uniform", "alloc-moe"), timed=("alloc-moe",))
    results = make_results(settings)
    published = replace(results.model.published, speedup={})
    results = replace(results, model=replace(results.model, published=published))
    found = figures(results)
    # Uniform alone is left of the comparisons that are not about Alloc-MoE
    assert {*KEYS} - {*found} == {"k-base", "calibration"}
    assert {row[1] for row in found["speedup"].rows} == {"unmodified", "alloc-moe"}
    assert "has nothing to be compared with" in found["alloc-l"].caption
    for plot in found.values():
        check(plot)


def test_a_model_with_one_layer_has_figures_too() -> None:
    one = ModelInfo("tiny/one", None, "olmoe", (12,), (16,), None)
    for plot in figures(make_results(tiny_settings(seeds=1), info=one)).values():
        check(plot)
