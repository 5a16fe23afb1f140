"""The selection kernel against `routing`, on CUDA or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from allocmoe import routing
from allocmoe.artifacts import TokenRule
from allocmoe.kernels.fused import launch
from allocmoe.models import inspect_model
from allocmoe.runtime.control import LayerControl
from allocmoe.runtime.step import CurrentStep, Step
from tiny import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E = 16
SHAPES = [(1, 4), (3, 2), (8, 6), (29, 7), (40, 6), (66, 8)]
if DEVICE == "cuda":
    SHAPES += [(333, 8), (4098, 6), (20000, 6)]


def scores(T: int, K: int, *, ties: bool) -> torch.Tensor:
    values = torch.rand(T, K, generator=torch.Generator().manual_seed(T + K))
    if ties:
        values = (values * 5).round() / 5
    return values.sort(1, descending=True).values.to(DEVICE)


def _logits(index: torch.Tensor, scores_TK: torch.Tensor) -> torch.Tensor:
    """Of a router that gives the scores themselves; padding may have the expert -1."""
    return torch.zeros(len(index), E, device=DEVICE).scatter(1, index.clamp_min(0), scores_TK)


def select(scores_TK: torch.Tensor, valid_T: torch.Tensor | None, **settings: Any) -> Any:
    T, K = scores_TK.shape
    index = torch.rand(T, E, device=DEVICE).argsort(1)[:, :K]
    given: dict[str, Any] = dict(
        num_experts=E,
        rule="pool",
        score="given",
        bias_on="none",
        base=1,
        num_pools=1,
        renormalise=False,
        renormalise_over=0,
    )
    budget, threshold = settings.pop("budget", 1.0), settings.pop("threshold", 0.0)
    params = torch.tensor([budget, threshold], dtype=torch.float64, device=DEVICE)
    chosen, weights = launch.launch_select(
        index, scores_TK, _logits(index, scores_TK), None, valid_T, params, **given | settings
    )
    keep = chosen < E
    assert torch.equal(chosen[keep].long(), index[keep])
    assert (chosen[~keep] == E).all()
    return keep, weights


@pytest.mark.parametrize("way", ["one program", "standing", "radix"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("T", "K"), SHAPES)
def test_pools(
    T: int, K: int, padded: bool, ties: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of the pool would choose, each way keeps the same pairs."""
    if way == "one program":
        if triton.next_power_of_2(T) * triton.next_power_of_2(K) > launch._POOL:
            pytest.skip("more than a program holds")
    else:
        monkeypatch.setattr(launch, "_POOL", 0)
        monkeypatch.setattr(launch, "_STANDING", 0 if way == "radix" else 1 << 20)
    values = scores(T, K, ties=ties)
    valid = None
    if padded:
        valid = torch.rand(T, generator=torch.Generator().manual_seed(T)).to(DEVICE) < 0.8
    for pools in (1, 2) if T % 2 == 0 else (1,):
        for k_base, budget in ((0, 1.5), (1, 1.0), (1, 1.75), (2, min(2.5, K)), (1, float(K))):
            base = routing.base_of(budget, k_base)
            keep, _ = select(values, valid, base=base, num_pools=pools, budget=budget)
            expected = routing.select_sequence(values, budget, pools, k_base, valid)
            assert torch.equal(keep, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("T", "K"), SHAPES)
def test_rules_that_need_no_pool(T: int, K: int, padded: bool) -> None:
    values = scores(T, K, ties=False)
    valid = torch.arange(T, device=DEVICE) % 3 != 1 if padded else None
    # a threshold that is a score, and its neighbours in float64
    exact = float(values[T // 2, 1].double())
    for threshold in (0.3, exact, exact - 1e-12, exact + 1e-12):
        settings: dict[str, Any] = dict(budget=2.0, threshold=threshold)
        keep, _ = select(values, valid, rule="threshold", **settings)
        assert torch.equal(keep, routing.select_threshold(values, 2.0, threshold, 1, valid))
        keep, _ = select(values, valid, rule="naee", **settings)
        assert torch.equal(keep, routing.select_naee(values, threshold, valid))
        keep, _ = select(values, valid, rule="dynamic-moe", **settings)
        assert torch.equal(keep, routing.select_dynamic_moe(values, threshold, valid))
    keep, _ = select(values, valid, rule="top_k", base=2)
    assert torch.equal(keep, routing.select_top_k(values, 2, valid))


@pytest.mark.parametrize("way", ["one program", "standing", "radix"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("marked", [False, True])
def test_what_is_not_a_number_takes_one_place_like_any_other(
    marked: bool, score: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a token or in padding: exactly the budget runs, and every expert id is a chosen one."""
    monkeypatch.setattr(launch, "_POOL", launch._POOL if way == "one program" else 0)
    monkeypatch.setattr(launch, "_STANDING", 0 if way == "radix" else 1 << 20)
    T, K = 20, 6
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    index = logits.topk(K, dim=1).indices
    logits[5], logits[11, index[11, 2]] = float("nan"), -float("nan")
    valid = torch.arange(T, device=DEVICE) != 5 if marked else None
    tokens = T - marked
    for stand_in in (False, True):
        activity = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        chosen, _ = launch.launch_select(
            index, torch.ones(T, K, device=DEVICE), logits, None, valid,
            torch.tensor([2.0, 0.0], dtype=torch.float64, device=DEVICE), num_experts=E,
            rule="pool", score=score, bias_on="none", base=1, num_pools=1, renormalise=False,
            renormalise_over=0, stand_in=stand_in, activity=activity,
        )  # fmt: skip
        assert activity.tolist() == [2 * tokens, tokens]
        if stand_in:
            assert (chosen[:, :, None] == index[:, None, :]).any(2).all()
        else:
            assert int((chosen < E).sum()) == 2 * tokens


@pytest.mark.parametrize("over", [0, 2])
def test_weights(over: int) -> None:
    values = scores(40, 6, ties=False)
    keep, weights = select(values, None, budget=2.5, renormalise=True, renormalise_over=over)
    expected = routing.reweigh(values, values, keep, over or None)
    torch.testing.assert_close(weights, torch.where(keep, expected, 0.0))
    keep, weights = select(values, None, budget=2.5)
    assert torch.equal(weights, torch.where(keep, values, 0.0))


@pytest.mark.parametrize("way", ["standing", "radix"])
@pytest.mark.parametrize("padding", ["marked, no expert", "marked", "no slot"])
def test_a_stand_in_is_an_expert_that_the_token_runs(
    padding: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM wants it: padding that comes as -1 stays so, and what ran is counted."""
    monkeypatch.setattr(launch, "_STANDING", 0 if way == "radix" else 1 << 20)
    values = scores(40, 6, ties=False)
    index = torch.rand(40, E, device=DEVICE).argsort(1)[:, :6]
    valid = torch.arange(40, device=DEVICE) < 33
    marks = ~valid
    if padding == "no slot":
        marks = torch.where(valid, torch.arange(40, device=DEVICE), -1)
    elif padding == "marked, no expert":
        index[~valid] = -1
    activity = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    params = torch.tensor([2.5, 0.0], dtype=torch.float64, device=DEVICE)
    for times in (1, 2):
        chosen, weights = launch.launch_select(
            index, values, _logits(index, values), None, None, params, num_experts=E, rule="pool",
            score="given", bias_on="none", base=1, num_pools=1, renormalise=False,
            renormalise_over=0, stand_in=True, padding_T=marks, activity=activity,
        )  # fmt: skip
        assert activity.tolist() == [times * round(2.5 * 33), times * 33]
    keep = routing.select_batch(values, 2.5, 1, valid)
    expected = torch.where(keep, index, index[:, :1])
    assert torch.equal(chosen.long(), expected)
    assert torch.equal(weights, torch.where(keep, values, 0.0))


# softmax; renormalised; sigmoid with a bias; a bias on the logits; scores as the router gives them
@pytest.mark.parametrize(
    "family", ["olmoe", "mixtral", "deepseek_v3", "kolibri1", "cohere2_moe", "gemma4", "phimoe"]
)
@pytest.mark.parametrize("scope", ["batch", "sequence", "threshold"])
def test_every_kind_of_score(family: str, scope: Any) -> None:
    """From a router's own output the kernel keeps and weighs what the plain path does."""
    try:
        model = tiny(family).to(DEVICE)
    except KeyError:
        pytest.skip(f"this version of transformers has no {family}")
    moe = inspect_model(model)
    layer = moe.layers[0]
    thresholds = (0.2,) * len(moe.layers) if scope == "threshold" else None
    token = TokenRule("alloc-t", scope, thresholds=thresholds)
    valid = torch.arange(21, device=DEVICE) % 5 != 2
    control = LayerControl(layer, moe.family, token, CurrentStep(Step(3, valid)))
    control.set_budget(1.4)
    seen: list[Any] = []
    hooks = [
        layer.router.register_forward_hook(lambda m, a, out: control.see_router(out)),
        layer.experts.register_forward_pre_hook(lambda m, args: seen.append(args[1:])),
    ]
    with torch.no_grad():
        model(torch.randint(3, 128, (3, 7), device=DEVICE))
    for hook in hooks:
        hook.remove()
    index, weights = seen[0]
    ranked, ranked_weights, values = control.rank(index, weights)
    keep = control.select(values)
    expected = torch.where(keep, control.reweigh(ranked_weights, values, keep), 0.0)
    chosen, got = control.select_fused(index, weights)
    dense = torch.zeros(21, layer.num_experts + 1, device=DEVICE)
    assert torch.equal(
        dense.scatter(1, chosen.long(), 1.0)[:, :-1],
        dense.scatter(1, torch.where(keep, ranked, layer.num_experts), 1.0)[:, :-1],
    )
    torch.testing.assert_close(
        dense.scatter_add(1, chosen.long(), got.float())[:, :-1],
        dense.scatter_add(1, ranked, expected.float())[:, :-1],
    )
