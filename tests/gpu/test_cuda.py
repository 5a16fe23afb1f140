"""The runtime on a CUDA device: same selection as on the host, no waiting, same bits twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import allocmoe
from allocmoe import routing
from allocmoe.artifacts import TokenRule
from allocmoe.kernels import compact, run_experts
from allocmoe.kernels.reference import run_experts_reference
from allocmoe.models import inspect_model
from allocmoe.runtime.hf import Controller
from no_waiting import no_waiting
from tiny import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FAMILIES = ["olmoe", "qwen2_moe", "deepseek_v2", "mixtral", "deepseek_v3", "gpt_oss", "phimoe"]
IDS = torch.randint(3, 128, (3, 21), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_budget_is_the_untouched_model(model: Any, dtype: torch.dtype) -> None:
    model = model.to(dtype)
    moe = inspect_model(model)
    with torch.no_grad():
        untouched = model(IDS.cuda()).logits
        for token in (TokenRule(), TokenRule("alloc-t", "batch")):
            with Controller(moe, token) as controller:
                controller.set_budgets(moe.k_orig)
                assert torch.equal(model(IDS.cuda()).logits, untouched)
        assert torch.equal(model(IDS.cuda()).logits, untouched)


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_device_equals_host(model: Any, scope: Any) -> None:
    """The same pairs run, and the logits agree with the CPU's."""
    model = model.float()
    results = []
    for device in ("cuda", "cpu"):
        moe = inspect_model(model.to(device))
        budgets = [1 + 0.4 * (k - 1) for k in moe.k_orig]
        with torch.no_grad(), Controller(moe, TokenRule("alloc-t", scope)) as controller:
            controller.set_budgets(budgets)
            results.append(model(IDS.to(device)).logits.cpu())
            pairs = [layer.activations for layer in controller.activity()]
        pools = 1 if scope == "batch" else len(IDS)
        assert pairs == [pools * round(b * IDS.numel() / pools) for b in budgets]
    model.cuda()
    torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)


def test_selection_is_the_same_on_every_device() -> None:
    generator = torch.Generator().manual_seed(1)
    for T, K in ((1, 4), (7, 6), (64, 8), (4097, 8)):
        # few distinct values, so that ties decide
        scores = (torch.rand(T, K, generator=generator) * 6).round() / 6
        scores = scores.sort(1, descending=True).values
        valid = torch.rand(T, generator=generator) < 0.8
        for budget in (1.0, 1.7, 2.5, float(K)):
            for mask in (None, valid):
                host = routing.select_batch(scores, budget, 1, mask)
                device = routing.select_batch(
                    scores.cuda(), budget, 1, None if mask is None else mask.cuda()
                )
                assert torch.equal(host, device.cpu())


def test_rules_do_not_wait() -> None:
    scores = torch.rand(300, 6, device="cuda").sort(1, descending=True).values
    valid = torch.rand(300, device="cuda") < 0.9
    with no_waiting():
        for mask in (None, valid):
            routing.select_batch(scores, 2.5, 1, mask)
            routing.select_threshold(scores, 2.5, 0.3, 1, mask)
            routing.select_naee(scores, 0.4, mask)
            routing.select_dynamic_moe(scores, 0.8, mask)


def test_a_step_without_padding_does_not_wait() -> None:
    """The pairs of the batch scope are counted beforehand, so a whole forward runs ahead."""
    model = tiny("olmoe").to("cuda", torch.bfloat16)
    moe = inspect_model(model)
    ids = IDS.cuda()
    with torch.no_grad(), Controller(moe, TokenRule("alloc-t", "batch")) as controller:
        controller.set_budgets([2.5] * len(moe.layers))
        model(ids)
        with no_waiting():
            model(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 5, 64, 257])
def test_experts_against_the_reference(model: Any, dtype: torch.dtype, T: int) -> None:
    layer = inspect_model(model.to(dtype)).layers[0]
    module = layer.experts
    hidden = torch.randn(T, 32, device="cuda", dtype=dtype)
    index = torch.rand(T, module.num_experts, device="cuda").argsort(1)[:, : layer.k_orig]
    weights = torch.rand(T, layer.k_orig, device="cuda", dtype=dtype)
    keep = torch.rand(T, layer.k_orig, device="cuda") < 0.5
    with torch.no_grad():
        pairs = compact(index, weights, keep, int(keep.sum()))
        out = run_experts(module, hidden, pairs, T)
        assert torch.equal(out, run_experts(module, hidden, pairs, T))
        expected = run_experts_reference(module, hidden, pairs, T)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(cache: str) -> None:
    model = tiny("olmoe").to("cuda", torch.bfloat16)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    plan = allocmoe.make_plan("alloc-t", "50%", model=model)
    with allocmoe.apply(model, plan) as applied:
        out = model.generate(
            IDS.cuda(),
            attention_mask=mask.cuda(),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            cache_implementation=cache,
        )
        activity = applied.activity()
    assert out.shape == (3, 29)
    tokens = int(mask.sum()) + 3 * 7
    assert [(a.tokens, a.activations) for a in activity] == [(tokens, 2 * tokens)] * 4


@pytest.mark.parametrize("token", [TokenRule(), TokenRule("alloc-t", "batch")])
def test_profile_equals_the_hosts(token: TokenRule) -> None:
    text = allocmoe.text_from_ids(IDS)
    rows = [
        allocmoe.profile(tiny("olmoe").to(device), text, token=token).perplexity
        for device in ("cpu", "cuda")
    ]
    for host, device in zip(*rows, strict=True):
        assert device == pytest.approx(host, rel=1e-3)
