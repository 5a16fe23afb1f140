"""Numbers of an experiment: means, noise, tables and the verdicts on the paper's claims."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from allocmoe.experiment.claims import Claim, make_claims
from allocmoe.experiment.figures.routing import expert_load, layers_and_tokens
from allocmoe.experiment.grid import Cell, PlanName
from allocmoe.experiment.results import Measure, Results, Value, mean_value
from allocmoe.experiment.tables import Table, make_tables
from experiment_results import STDERR, TINY, make_results, rise, score, tiny_settings

HIGHER = Measure("scores", True, lambda plan: None)
LOWER = Measure("rises", False, lambda plan: None)


def table_of(results: Results, key: str) -> Table:
    return next(table for table in make_tables(results) if table.key == key)


def claim_of(results: Results, name: str, by: str) -> Claim:
    return next(c for c in make_claims(results) if c.name == name and c.by == by)


def test_better_is_up_or_down() -> None:
    one, other = Value((2.0,), 0.1), Value((1.0,), 0.1)
    assert HIGHER.compare(one, other).verdict == "ahead"
    assert LOWER.compare(one, other).verdict == "behind"


def test_noise_of_seeds_is_that_of_the_paired_difference() -> None:
    # they rise and fall together, so the difference is sure
    one, other = Value((1.0, 2.0, 3.0)), Value((1.5, 2.5, 3.51))
    difference = LOWER.compare(one, other)
    assert difference.better_by == pytest.approx(0.50333, abs=1e-4)
    assert difference.noise == pytest.approx(4.303 * 0.0057735 / math.sqrt(3), rel=1e-3)
    assert difference.verdict == "ahead"
    assert LOWER.compare(one, Value((3.0, 2.0, 1.1))).verdict == "within noise"


def test_noise_of_items_and_of_seeds_add_up() -> None:
    one, other = Value((50.0,), 3.0), Value((55.0,), 4.0)
    assert HIGHER.compare(one, other).noise == pytest.approx(1.96 * 5)
    assert HIGHER.compare(one, other).verdict == "within noise"
    seeds = HIGHER.compare(Value((50.0, 50.0), 3.0), Value((55.0, 57.0), 4.0)).noise
    assert seeds == pytest.approx(math.hypot(1.96 * 5, 12.706 * math.sqrt(2) / math.sqrt(2)))
    assert HIGHER.compare(Value((1.0,)), Value((2.0,))).noise is None


def test_noise_of_items_is_that_of_the_paired_difference() -> None:
    draw = np.random.default_rng(0)
    right = (draw.random(400) < 0.5) * 100.0
    other = right.copy()
    other[:20] = 100 - other[:20]
    one = Value((right.mean(),), 2.5, {"task": right})
    two = Value((other.mean(),), 2.5, {"task": other})
    gaps = right - other
    assert HIGHER.compare(one, two).noise == pytest.approx(1.96 * gaps.std() / 20)
    # over several tasks their items are apart, over several plans they are the same
    far = Value((right.mean(),), 2.5, {"far": right})
    tasks = [mean_value([value, far]) for value in (one, two)]
    assert tasks[0] is not None
    assert tasks[1] is not None
    assert HIGHER.compare(*tasks).noise == pytest.approx(1.96 * gaps.std() / 20 / 2)
    plans = mean_value([one, two], same_items=True)
    assert plans is not None
    assert HIGHER.compare(plans, one).noise == pytest.approx(1.96 * gaps.std() / 20 / 2)
    assert HIGHER.compare(one, far).noise == pytest.approx(1.96 * math.hypot(2.5, 2.5), rel=0.01)
    # what is not known of one is known of none
    blank = mean_value([one, Value((1.0,), 2.5)])
    assert blank is not None
    assert not blank.items


def test_hits_are_the_items_of_a_score() -> None:
    results = make_results()
    task = results.settings.tasks.groups["NLU"][0]
    plans = [None, PlanName("uniform", results.grid.half)]
    cells = [Cell("task", plan=plan, task=task.task) for plan in plans]
    found = dict(results.found)
    for cell, hits in zip(cells, ("1110" * 10, "1111" * 10), strict=True):
        key = next(iter(found[cell.id]["scores"]))
        found[cell.id] = found[cell.id] | {"hits": {key: hits}}
    values = [replace(results, found=found).score(task, plan) for plan in plans]
    assert values[0] is not None
    assert values[1] is not None
    assert values[0].items[task.task].mean() == 75
    noise = HIGHER.compare(values[0], values[1]).noise
    assert noise == pytest.approx(1.96 * 100 * math.sqrt(0.25 * 0.75 / 40))


def test_errors_average_out_over_tasks_but_not_over_budgets() -> None:
    values = [Value((1.0,), 0.2), Value((3.0,), 0.2)]
    apart, together = mean_value(values), mean_value(values, same_items=True)
    assert apart is not None
    assert together is not None
    assert apart.mean == together.mean == 2.0
    assert apart.stderr == pytest.approx(0.2 / math.sqrt(2))
    assert together.stderr == pytest.approx(0.2)
    assert mean_value([*values, None]) is None
    assert mean_value([]) is None
    # a plan that no seed changes counts for every seed
    mixed = mean_value([Value((1.0, 2.0)), Value((4.0,))])
    assert mixed is not None
    assert mixed.samples == (2.5, 3.0)


def test_tables_hold_the_measured_numbers() -> None:
    results = make_results()
    budgets = results.grid.budgets
    first = results.settings.measurement.texts[0].name
    table = table_of(results, "main-wikitext2-test")
    assert first == "WikiText2 test"
    assert table.columns == ("method", *map(str, budgets), "mean")
    row = next(cells for cells in table.rows if cells[0] == "uniform")
    for budget, cell in zip(budgets, row[1:], strict=False):
        rises = [rise(TINY, PlanName("uniform", budget), 0, seed) for seed in (0, 1)]
        assert cell.startswith(f"{sum(rises) / 2:.4f} ±")
    # the best of a column is in bold
    assert all(cell.startswith("**") for cell in table.rows[-1][1:])
    assert table.rows[-1][0] == "alloc-moe"
    scores = table_of(results, "main-nlu")
    assert scores.rows[0][0] == "unmodified"
    cell = next(cells for cells in scores.rows if cells[0] == "uniform")[1]
    expected = 50 * sum(score(TINY, PlanName("uniform", budgets[0]), task) for task in (0, 1))
    assert cell == f"{expected:.2f} ±{100 * STDERR / math.sqrt(2):.2f}"


def test_the_papers_numbers_stand_beside_ours() -> None:
    table = table_of(make_results(), "ablation-tasks")
    rows = {cells[0]: cells[1:] for cells in table.rows}
    assert rows["+L +T, the paper's"] == ("46.17", "46.01", "45.48", "43.09", "45.19")
    assert {"Uniform", "+L", "+T", "+L +T"} <= {*rows}
    speed = table_of(make_results(), "speed")
    assert speed.rows[-1][:4] == ("alloc-moe, the paper's", "8", "1.15", "1.34")


def test_means_are_taken_apart() -> None:
    """What is a mean of texts or groups stands for each of them too."""
    settings = tiny_settings()
    both = replace(settings.calibration, contexts=("paper", "single"))
    results = make_results(replace(settings, calibration=both))
    half = results.grid.half
    for key, name, plan in (
        ("ablation", "+L", PlanName("alloc-l", half)),
        ("calibration", both.texts[1].name, PlanName("alloc-l", half, text=1)),
        ("context", "alloc-moe, single", PlanName("alloc-moe", half, context=1)),
    ):
        for number, text in enumerate(("wikitext2-test", "c4-other-part")):
            table = table_of(results, f"{key}-{text}")
            row = next(cells for cells in table.rows if cells[0] == name)
            rises = [rise(TINY, plan, number, seed) for seed in range(settings.seeds)]
            cell = row[1 + results.grid.budgets.index(half)].strip("*")
            assert cell.startswith(f"{statistics.fmean(rises):.4f} ±"), (key, text)


def test_what_is_not_finished_is_no_number() -> None:
    results = make_results(keep=lambda cell: cell.kind != "task")
    rows = table_of(results, "main-nlu").rows
    assert {cell for cells in rows for cell in cells[1:]} == {"-"}
    one_missing = make_results(keep=lambda cell: cell.id != "task-boolq-uniform@8")
    row = next(c for c in table_of(one_missing, "main-nlu").rows if c[0] == "uniform")
    assert [cell == "-" for cell in row[1:]] == [False, False, True, False, True]


def test_claims_that_the_numbers_bear_out() -> None:
    results = make_results(tiny_settings(seeds=3))
    for name, by in (
        ("Alloc-MoE is ahead of all baselines", "perplexity"),
        ("+L is ahead of Uniform", "perplexity"),
        ("+T is ahead of +L", "perplexity"),
        ("+L +T is ahead of +T", "perplexity"),
        ("K_base = 1 is best", "perplexity"),
        ("the calibration text hardly matters", "perplexity"),
        ("fewer activations are faster, budget after budget", "decode"),
    ):
        assert claim_of(results, name, by).verdict == "holds", name
    ahead = claim_of(results, "Alloc-MoE is ahead of all baselines", "perplexity")
    assert ahead.here.startswith("in 8 of 8 settings, in 8 of them beyond the noise")


def test_claims_that_they_do_not() -> None:
    results = make_results(tiny_settings(seeds=3))
    worse: dict[str, Any] = dict(results.found)
    for cell in results.grid.cells:
        if cell.kind == "text":
            rows = [
                row | {"log_rise": 9.0 + 0.01 * cell.seed}
                if row["name"].startswith("alloc-moe")
                else row
                for row in worse[cell.id]["rows"]
            ]
            worse[cell.id] = worse[cell.id] | {"rows": rows}
    bad = replace(results, found=worse)
    ahead = claim_of(bad, "Alloc-MoE is ahead of all baselines", "perplexity")
    assert ahead.verdict == "does not hold"
    assert ahead.here.startswith("in 0 of 8 settings")
    assert claim_of(bad, "+L +T is ahead of +T", "perplexity").verdict == "does not hold"


@pytest.mark.parametrize(
    ("shifts", "verdict"),
    [
        ((0.0, 0.0, 0.0), "holds"),
        # on average nearer than what Alloc-L gains, but not surely
        ((0.0, 0.02, 0.05), "within noise"),
        # far apart, but not the same way for every seed
        ((0.7, -0.2, 0.1), "within noise"),
        # surely further apart than what Alloc-L gains
        ((0.2, 0.21, 0.2), "does not hold"),
    ],
)
def test_texts_that_lie_apart(shifts: tuple[float, ...], verdict: str) -> None:
    results = make_results(tiny_settings(seeds=3))
    moved: dict[str, Any] = dict(results.found)
    for cell in results.grid.cells:
        if cell.kind == "text":
            rows = [
                row | {"log_rise": row["log_rise"] + shifts[cell.seed]}
                if row["name"].startswith("alloc-l") and row["name"].endswith("-t1")
                else row
                for row in moved[cell.id]["rows"]
            ]
            moved[cell.id] = moved[cell.id] | {"rows": rows}
    claim = claim_of(
        replace(results, found=moved), "the calibration text hardly matters", "perplexity"
    )
    assert claim.verdict == verdict


@pytest.mark.parametrize(
    ("speedups", "drift", "here", "verdict"),
    [
        # by budget, from the largest to the smallest
        ((1.1, 1.2, 1.3), 0.01, "1.00, 1.10, 1.20, 1.30, noise 1.0%", "holds"),
        ((1.1, 1.2, 1.15), 0.01, "1.00, 1.10, 1.20, 1.15, noise 1.0%", "does not hold"),
        ((1.1, 1.2, 1.19), -0.02, "1.00, 1.10, 1.20, 1.19, noise 2.0%", "within noise"),
        ((1.1,), 0.0, "1.00, 1.10, noise 0.0%", "holds"),
        # slower than the unmodified model
        ((0.9, 1.2), 0.0, "1.00, 0.90, 1.20, noise 0.0%", "does not hold"),
    ],
)
def test_fewer_activations_are_faster(
    speedups: tuple[float, ...], drift: float, here: str, verdict: str
) -> None:
    results = make_results()
    budgets = sorted(results.grid.budgets, reverse=True)[: len(speedups)]
    found = dict(results.found["speed-all"]) | {"decode_drift": drift}
    of = {PlanName("alloc-moe", b).label: s for b, s in zip(budgets, speedups, strict=True)}
    found["rows"] = [
        row | {"decode": row["decode"] | {"speedup": of[row["name"]]}}
        for row in found["rows"]
        if row["name"] in of
    ]
    # the order of the settings does not matter
    grid = replace(results.grid, budgets=tuple(budgets[::-1]))
    changed = replace(results, grid=grid, found={**results.found, "speed-all": found})
    claim = claim_of(changed, "fewer activations are faster, budget after budget", "decode")
    assert (claim.here, claim.verdict) == (here, verdict)


def test_all_that_tie_are_bold() -> None:
    results = make_results()
    found = dict(results.found)
    for cell in results.grid.cells:
        if cell.kind == "text":
            rows = [row | {"log_rise": 0.1 + 0.01 * cell.seed} for row in found[cell.id]["rows"]]
            found[cell.id] = found[cell.id] | {"rows": rows}
    table = table_of(replace(results, found=found), "main-wikitext2-test")
    assert all(cell.startswith("**") for row in table.rows for cell in row[1:])


def test_any_budget_tells_the_unmodified_perplexity() -> None:
    whole = make_results()
    last = make_results(keep=lambda c: c.kind != "text" or c.budget == whole.grid.budgets[-1])
    assert last.unmodified_perplexity(1) == whole.unmodified_perplexity(1) == Value((10.0, 10.0))
    one_seed = make_results(keep=lambda cell: cell.kind != "text" or cell.seed == 1)
    assert one_seed.unmodified_perplexity(1) is None


def test_captions_tell_their_seeds() -> None:
    results = make_results(keep=lambda cell: cell.id != "analysis-s0")
    assert [plot.caption[-14:] for plot in expert_load(results)] == [" Seed 1 alone."]
    (plot,) = layers_and_tokens(results)
    assert {row[1] for row in plot.rows if row[0] == "kept"} == {"1"}
    both = make_results()
    layers = [analysis.layers[1] for analysis in both.analyses]
    (plot,) = layers_and_tokens(both)
    low = statistics.fmean(layer.kept_by_entropy[0][1] for layer in layers)
    mean = statistics.fmean(layer.entropy_correlation or 0.0 for layer in layers)
    assert f"the most decided tenth of the tokens keeps {low:.2f} experts" in plot.caption
    assert f"is {mean:.2f}. Lines are seeds, the numbers means of 2." in plot.caption


def test_claims_within_the_noise() -> None:
    """Scores a point apart, with items that leave several points open."""
    results = make_results()
    noisy: dict[str, Any] = dict(results.found)
    for cell in results.grid.cells:
        if cell.kind == "task":
            scores = {
                name: value | {"stderr": 0.2} for name, value in noisy[cell.id]["scores"].items()
            }
            noisy[cell.id] = noisy[cell.id] | {"scores": scores}
    unsure = replace(results, found=noisy)
    for name in ("Alloc-MoE is ahead of all baselines", "+L is ahead of Uniform"):
        assert claim_of(unsure, name, "tasks").verdict == "within noise"


def test_nothing_is_claimed_of_nothing() -> None:
    empty = make_results(keep=lambda cell: False)
    assert {claim.verdict for claim in make_claims(empty)} == {"not measured"}
    assert make_tables(empty)


def test_a_model_with_one_layer() -> None:
    one = replace(TINY, k_orig=(16,), num_experts=(32,))
    assert make_claims(make_results(info=one))


def test_the_metric_is_found_under_its_filter() -> None:
    results = make_results()
    task = results.settings.tasks.groups["Math"][0]
    cell = Cell("task", plan=None, task=task.task)
    found = results.found[cell.id]
    assert task.metric == "exact_match"
    (value,) = [v for k, v in found["scores"].items() if k.partition(",")[0] == "exact_match"]
    filtered = {**found, "scores": {"other": value | {"value": 0.0}, "exact_match,strict": value}}
    changed = replace(results, found={**results.found, cell.id: filtered})
    assert changed.score(task, None) == results.score(task, None)
