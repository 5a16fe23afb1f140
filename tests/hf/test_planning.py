"""Methods, calibration and evaluation on tiny models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import allocmoe
from allocmoe.artifacts import TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.models import inspect_model
from allocmoe.planning.methods import METHODS, Planner
from allocmoe.profiling.lexi import lexi_distances
from allocmoe.progress import Progress
from allocmoe.solver import solve_frontier
from tiny import tiny

torch.manual_seed(0)
TEXT = allocmoe.text_from_ids(torch.randint(3, 128, (6, 40)), "calibration")
EVAL = allocmoe.text_from_ids(torch.randint(3, 128, (4, 32)), "evaluation")


def planner(model: Any, **options: Any) -> Planner:
    sensitivity = allocmoe.profile(model, TEXT)
    info = inspect_model(model).info
    return Planner(info, model=model, text=TEXT, sensitivity=sensitivity, **options)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "mixtral"])
def test_every_method_keeps_its_budget(family: str) -> None:
    model = tiny(family)
    plans = planner(model)
    L, full = len(plans.info.k_orig), sum(plans.info.k_orig)
    for method in METHODS:
        for budget in (L, full // 2, "70%", full):
            plan = plans.plan(method, budget)
            assert plan.budget_used <= plan.budget
            with torch.no_grad(), allocmoe.apply(model, plan) as applied:
                for ids in TEXT.ids.split(4):
                    model(ids)
            realised = [layer.mean for layer in applied.activity()]
            if method == "dynamic-moe":
                assert sum(realised) == pytest.approx(plan.budget, rel=0.02)
            else:
                # exact up to the rounding of round(K_l * T); for NAEE on its calibration text
                assert realised == pytest.approx(list(plan.layer_budgets), abs=1 / 80)


@pytest.mark.parametrize("rule", ["alloc-t", "naee"])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", "qwen3_moe", "phimoe"])
def test_calibrated_layers_meet_their_budget_on_the_text(family: str, rule: Any) -> None:
    model = tiny(family)
    plan = allocmoe.make_plan(rule, "60%", model=model, text=TEXT, scope="threshold", batch_size=2)
    with torch.no_grad(), allocmoe.apply(model, plan) as applied:
        for ids in TEXT.ids.split(3):
            model(ids)
    tokens = TEXT.ids.numel()
    for ran, budget in zip(applied.activity(), plan.layer_budgets, strict=True):
        # later layers see what the thinned-out layers before them produce, so this is exact
        assert abs(ran.activations - budget * tokens) <= 1


def test_one_p_leaves_layers_out_that_run_all_of_their_experts() -> None:
    model = tiny("olmoe")
    for layer, k in zip(model.model.layers, (2, 4, 6, 4), strict=True):
        layer.mlp.gate.top_k = k
    plan = allocmoe.make_plan("dynamic-moe", 14, model=model, text=TEXT)
    assert plan.layer_budgets == (2, 4, 4, 4)
    row = allocmoe.evaluate(model, {"p": plan}, TEXT).rows[1]
    assert row.realised_per_layer == pytest.approx((2, 4, 4, 4), abs=0.02)


def test_a_plan_names_the_text_of_its_thresholds() -> None:
    model = tiny("olmoe")
    plans = planner(model, scope="threshold")
    plans.text = EVAL
    plan = plans.plan("alloc-moe", 8)
    assert (plan.text, plan.threshold_text) == (TEXT.info, EVAL.info)
    assert plans.plan("alloc-l", 8).threshold_text is None


def test_threshold_scope_is_batch_invariant() -> None:
    model = tiny("olmoe")
    plan = allocmoe.make_plan("alloc-t", "50%", model=model, text=TEXT, scope="threshold")
    with torch.no_grad(), allocmoe.apply(model, plan):
        together = model(EVAL.ids).logits
        alone = torch.cat([model(row[None]).logits for row in EVAL.ids])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_alloc_l_is_the_best_split_of_its_own_sensitivity() -> None:
    sensitivity = allocmoe.profile(tiny("olmoe"), TEXT)
    cost = sensitivity.cost()
    plan = allocmoe.solve(sensitivity, 9)
    own = sum(cost[layer][int(k) - 1] for layer, k in enumerate(plan.layer_budgets))
    assert plan.predicted_loss == pytest.approx(own)
    for method in ("uniform", "ascending", "descending"):
        other = allocmoe.make_plan(method, 9, sensitivity=sensitivity).layer_budgets  # type: ignore[arg-type]
        assert own <= sum(cost[layer][int(k) - 1] for layer, k in enumerate(other)) + 1e-12


def test_a_full_budget_is_all_of_it_whatever_a_noisy_row_says() -> None:
    measured = allocmoe.profile(tiny("olmoe"), TEXT)
    rows = [list(row) for row in measured.perplexity]
    rows[1][2] = 0.9 * rows[1][3]
    noisy = replace(measured, perplexity=tuple(map(tuple, rows)))
    for method in ("alloc-l", "alloc-moe"):
        full = allocmoe.solve(noisy, "100%", method=method)  # type: ignore[arg-type]
        assert full.layer_budgets == (4.0, 4.0, 4.0, 4.0)
        assert full.predicted_loss == pytest.approx(0)
    notes: list[str] = []
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]
    plan = Planner(measured.model, sensitivity=noisy, progress=progress).plan("alloc-l", 15)
    assert plan.budget_used < 15
    assert "more would not help" in notes[0]


def test_a_plan_remembers_the_weights_that_were_profiled() -> None:
    measured = allocmoe.profile(tiny("olmoe"), TEXT)
    unread = replace(measured.model, fingerprint=None)
    plan = Planner(unread, sensitivity=measured).plan("alloc-l", 8)
    assert plan.model.fingerprint == measured.model.fingerprint is not None
    notes: list[str] = []
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]
    other = replace(measured.model, fingerprint="0" * 16)
    Planner(other, sensitivity=measured, progress=progress).plan("alloc-l", 8)
    assert "other weights" in notes[0]


def test_solving_with_a_profile_of_the_token_rule() -> None:
    model = tiny("olmoe")
    sensitivity = allocmoe.profile(model, TEXT, token=TokenRule("alloc-t", "batch", 2))
    with pytest.raises(AllocMoEError, match="measured with alloc-t/batch"):
        allocmoe.solve(sensitivity, 8)
    assert allocmoe.solve(sensitivity, 8, method="alloc-moe").token == sensitivity.token
    plan = allocmoe.make_plan("alloc-moe", 8, sensitivity=sensitivity)
    assert plan.token == sensitivity.token
    plan = allocmoe.make_plan("alloc-moe", 8, sensitivity=sensitivity, scope="sequence", k_base=1)
    assert plan.token == TokenRule("alloc-t", "sequence", 1)


def test_lexi_distances_against_the_block_itself() -> None:
    model = tiny("qwen2_moe")
    moe = inspect_model(model)
    D = lexi_distances(moe, samples=2, tokens=8, seed=3)
    block = moe.layers[1].block
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(1, 8, 32, generator=generator) for _ in range(2)]
    for k in (1, 2, 3, 4):
        total = 0.0
        for x in xs:
            with torch.no_grad():
                full = block(x)
                moe.layers[1].router.top_k = k
                total += float(torch.linalg.norm(block(x) - full))
                moe.layers[1].router.top_k = 4
        assert D[1][k - 1] == pytest.approx(total / 2, rel=1e-5)
    assert all(row[-1] == 0 for row in D)


def test_lexi_plan_is_the_optimum_of_its_distances() -> None:
    model = tiny("olmoe")
    D = lexi_distances(inspect_model(model))
    plan = allocmoe.make_plan("lexi", 8, model=model)
    ks = [[1.0, 2.0, 3.0, 4.0]] * 4
    assert plan.layer_budgets == solve_frontier(D, ks).at(8).layer_budgets
    evolved = allocmoe.make_plan("lexi", 8, model=model, lexi_search="evolve")
    assert sum(evolved.layer_budgets) == 8


def test_quality_against_its_definition() -> None:
    model = tiny("olmoe")
    plan = allocmoe.make_plan("uniform", "50%", model=model)
    result = allocmoe.evaluate(model, {"half": plan}, EVAL, batch_size=3)
    with torch.no_grad():
        base = model(EVAL.ids).logits.double()
        with allocmoe.apply(model, plan):
            half = model(EVAL.ids).logits.double()
    rows = {row.name: row for row in result.rows}
    for name, logits in (("unmodified", base), ("half", half)):
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), EVAL.ids[:, 1:].flatten())
        assert rows[name].perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    kl = F.kl_div(half.log_softmax(-1), base.log_softmax(-1), log_target=True, reduction="none")
    assert rows["half"].kl == pytest.approx(float(kl.sum(-1).mean()), rel=1e-4)
    agreement = (half.argmax(-1) == base.argmax(-1)).double().mean()
    assert rows["half"].top1_agreement == pytest.approx(float(agreement))
    assert rows["half"].realised == 8
    assert rows["unmodified"].realised == 16
    assert rows["unmodified"].kl == 0
    assert rows["unmodified"].top1_agreement == 1
    assert rows["half"].log_rise == pytest.approx(
        math.log(rows["half"].perplexity / rows["unmodified"].perplexity)
    )


def test_distinct_experts_of_a_decode_step() -> None:
    """Per position, the experts that the sequences of a batch touch together."""
    model = tiny("olmoe")
    moe = inspect_model(model)
    seen: list[torch.Tensor] = []
    moe.layers[0].experts.register_forward_pre_hook(lambda m, a: seen.append(a[1]))
    plan = allocmoe.make_plan("uniform", "50%", model=model)
    result = allocmoe.evaluate(model, {"half": plan}, EVAL, batch_size=4)
    index = seen[1].view(4, 32, 2)  # the second run is the plan's
    expected = sum(len(set(index[:, s].flatten().tolist())) for s in range(32)) / 32
    assert result.rows[1].distinct_per_step[0] == pytest.approx(expected)
    # a last batch of fewer sequences is another step
    short = allocmoe.evaluate(model, {"half": plan}, EVAL, batch_size=3)
    index = index[:3]
    expected = sum(len(set(index[:, s].flatten().tolist())) for s in range(32)) / 32
    assert short.rows[1].distinct_per_step[0] == pytest.approx(expected)
    assert allocmoe.evaluate(model, {}, EVAL, batch_size=9).sequences_a_step == 4


def test_optimize_keeps_what_measures_best(tmp_path: Path) -> None:
    model = tiny("olmoe")
    best = allocmoe.optimize(model, "50%", TEXT, EVAL, tmp_path)
    rows = {row.name: row for row in best.evaluation.rows}
    assert set(rows) == {
        "unmodified",
        "alloc-t",
        "alloc-moe/paper",
        "alloc-moe/single",
        "alloc-moe/around",
    }
    tried = {name: row.perplexity for name, row in rows.items() if name != "unmodified"}
    assert best.name == min(tried, key=tried.__getitem__)
    assert allocmoe.Plan.load(tmp_path / "plan.json") == best.plan
    assert allocmoe.Evaluation.load(tmp_path / "candidates.json") == best.evaluation
    with pytest.raises(AllocMoEError, match="measure on other text"):
        allocmoe.optimize(model, "50%", TEXT, TEXT, tmp_path)
    with pytest.raises(AllocMoEError, match="below 12, the least that the grid of k can make"):
        allocmoe.optimize(model, 8, TEXT, EVAL, tmp_path, ks=[3, 4])


def test_methods_say_what_they_need() -> None:
    info = inspect_model(tiny("olmoe")).info
    bare = Planner(info)
    for method in ("alloc-l", "alloc-moe"):
        with pytest.raises(AllocMoEError, match="needs a sensitivity"):
            bare.plan(method, 8)  # type: ignore[arg-type]
    for method in ("naee", "dynamic-moe"):
        with pytest.raises(AllocMoEError, match="give a model and a text"):
            bare.plan(method, 8)  # type: ignore[arg-type]
    with pytest.raises(AllocMoEError, match="weights"):
        bare.plan("lexi", 8)
    with pytest.raises(AllocMoEError, match="out of range"):
        bare.plan("uniform", 17)
