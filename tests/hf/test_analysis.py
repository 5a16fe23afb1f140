"""The analyses against their definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import allocmoe
from allocmoe.errors import AllocMoEError
from allocmoe.evaluation.analysis import spearman
from allocmoe.models import inspect_model
from allocmoe.planning.sweeps import sweep_k_base, sweep_texts
from tiny import tiny

torch.manual_seed(0)
TEXT = allocmoe.text_from_ids(torch.randint(3, 128, (6, 40)), "one")
OTHER = allocmoe.text_from_ids(torch.randint(3, 128, (6, 40)), "two")
EVAL = allocmoe.text_from_ids(torch.randint(3, 128, (4, 32)), "evaluation")


def routing(model: Any, layer: Any, plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's logits and its choice in one layer on the evaluation text."""
    seen = []
    hook = layer.router.register_forward_hook(lambda m, a, out: seen.append((out[0], out[2])))
    with torch.no_grad():
        if plan is None:
            model(EVAL.ids)
        else:
            with allocmoe.apply(model, plan):
                model(EVAL.ids)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2"])
def test_load_of_a_layer_budget(family: str) -> None:
    """With layer budgets the router itself says which experts run."""
    model = tiny(family)
    plan = allocmoe.make_plan("uniform", "50%", model=model)
    result = allocmoe.analyze(model, plan, EVAL, batch_size=4)
    layer = inspect_model(model).layers[1]
    loads = []
    for chosen in (None, plan):
        _, index = routing(model, layer, chosen)
        counts = torch.bincount(index.flatten(), minlength=8).double()
        loads.append(counts / counts.sum())
    found = result.layers[1]
    assert found.load_before == pytest.approx(loads[0].tolist())
    assert found.load_after == pytest.approx(loads[1].tolist())
    p, q = loads
    m = (p + q) / 2
    js = ((p * (p / m).log()).nansum() + (q * (q / m).log()).nansum()) / 2
    assert found.js_divergence == pytest.approx(float(js), abs=1e-12)
    assert found.entropy_before == pytest.approx(float(torch.special.entr(p).sum()) / math.log(8))
    # every token keeps the same number, so there is nothing to correlate
    assert found.entropy_correlation is None
    assert all(row[1] == pytest.approx(2) for row in found.kept_by_entropy)


def test_kept_experts_against_entropy() -> None:
    model = tiny("olmoe")
    plan = allocmoe.make_plan("alloc-t", "50%", model=model)
    result = allocmoe.analyze(model, plan, EVAL, batch_size=4)
    layer = inspect_model(model).layers[0]
    logits, _ = routing(model, layer, plan)
    p = logits.double().softmax(-1)
    top = p.sort(1, descending=True).values[:, :4]
    pool = top[:, 1:].flatten().sort(descending=True).values
    T = EVAL.ids.numel()
    kept = 1 + (top[:, 1:] >= pool[T - 1]).sum(1)
    entropy = torch.special.entr(p).sum(1)
    found = result.layers[0]
    assert found.entropy_correlation == pytest.approx(spearman(entropy.numpy(), kept.numpy()))
    assert sum(row[2] for row in found.kept_by_entropy) == T
    assert sum(row[1] * row[2] for row in found.kept_by_entropy) == pytest.approx(2 * T)
    assert result.realised_per_layer == pytest.approx((2.0,) * 4)


def test_spearman() -> None:
    import numpy as np

    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 90])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    # ties share their mean rank: ranks (1.5, 1.5, 3) against (1, 2, 3)
    assert spearman(np.array([5.0, 5, 6]), np.array([1.0, 2, 3])) == pytest.approx(0.8660254)
    assert spearman(np.array([1.0, 1, 1]), np.array([1.0, 2, 3])) is None


def test_sweeps() -> None:
    model = tiny("olmoe")
    plan = allocmoe.make_plan("alloc-t", "50%", model=model)
    rows = sweep_k_base(model, plan, EVAL)
    assert [row.value for row in rows] == ["0", "1", "2", "3"]
    assert rows[2].perplexity == rows[3].perplexity  # k_base is never more than the layer budget
    own = allocmoe.evaluate(model, {"own": plan}, EVAL).rows[1]
    assert rows[1].perplexity == own.perplexity
    by_text = sweep_texts(model, "50%", {"one": TEXT, "two": OTHER}, EVAL)
    assert [row.value for row in by_text] == ["one", "two"]
    assert all(sum(row.layer_budgets) <= 8 for row in by_text)
    renormalising = tiny("mixtral")
    plan = allocmoe.make_plan("alloc-t", "50%", model=renormalising, renormalise_over=4)
    own = allocmoe.evaluate(renormalising, {"own": plan}, EVAL).rows[1]
    assert sweep_k_base(renormalising, plan, EVAL)[1].perplexity == own.perplexity
    with pytest.raises(AllocMoEError, match="k_base is swept"):
        sweep_k_base(model, allocmoe.make_plan("uniform", "50%", model=model), EVAL)
