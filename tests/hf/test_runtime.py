"""The runtime beyond one plain forward: caches, precisions, devices, misuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import allocmoe
from allocmoe.artifacts import Plan, TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.models import inspect_model
from allocmoe.runtime.hf import IMPLEMENTATION, Controller
from tiny import tiny

torch.manual_seed(0)
IDS = torch.randint(3, 128, (2, 13))
PAPER_FAMILIES = ["olmoe", "qwen2_moe", "deepseek_v2"]


def plan_for(model: Any, budget: str = "50%", method: Any = "alloc-t", **options: Any) -> Plan:
    return allocmoe.make_plan(method, budget, model=model, **options)


@pytest.mark.parametrize("family", [*PAPER_FAMILIES, "mixtral", "gpt_oss", "deepseek_v3"])
def test_pairs_and_weights_are_those_of_the_method(family: str) -> None:
    """Alloc-T on a real model against the method written out on the router's own output."""
    model = tiny(family)
    moe = inspect_model(model)
    budget, layer = 2.4, moe.layers[-1]
    seen: dict[str, Any] = {}
    layer.router.register_forward_hook(lambda m, a, out: seen.update(router=out))
    layer.experts.register_forward_pre_hook(lambda m, a: seen.update(experts=a))
    layer.experts.register_forward_hook(lambda m, a, out: seen.update(out=out))
    with torch.no_grad(), Controller(moe, TokenRule("alloc-t", "batch")) as controller:
        controller.controls[layer.index].set_budget(budget)
        model(IDS)
    hidden, index, weights = seen["experts"]
    got = seen["out"]
    logits = seen["router"][0].float()
    bias = (
        getattr(layer.router, "e_score_correction_bias", None) if family == "deepseek_v3" else None
    )
    scores = logits.sigmoid() if family == "deepseek_v3" else logits.softmax(-1)

    T, K = index.shape
    ranked = []  # per token: (expert, weight, score) in the model's order
    for t in range(T):
        chosen = [
            (int(e), float(w), float(scores[t, e]))
            for e, w in zip(index[t], weights[t], strict=False)
        ]
        key = (lambda c: c[2]) if bias is None else (lambda c: c[2] + float(bias[c[0]]))
        ranked.append(sorted(chosen, key=key, reverse=True))
    pool = sorted((-ranked[t][k][2], t, k) for t in range(T) for k in range(1, K))
    keep = {(t, 0) for t in range(T)} | {(t, k) for _, t, k in pool[: round(budget * T) - T]}
    renormalises = family in ("mixtral", "gpt_oss", "deepseek_v3")
    expected = torch.zeros_like(hidden)
    for t in range(T):
        kept = [ranked[t][k] for k in range(K) if (t, k) in keep]
        ratio = sum(c[2] for c in ranked[t]) / sum(c[2] for c in kept) if renormalises else 1.0
        for expert, weight, _ in kept:
            one = torch.tensor([[expert]]), torch.tensor([[weight * ratio]])
            with torch.no_grad():
                expected[t] += layer.experts(hidden[t : t + 1], *one)[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", PAPER_FAMILIES)
def test_static_cache_equals_dynamic_cache(family: str) -> None:
    model = tiny(family)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    tokens, pairs = [], []
    for cache in ("dynamic", "static"):
        with allocmoe.apply(model, plan_for(model)) as applied:
            out = model.generate(
                IDS,
                attention_mask=mask,
                max_new_tokens=6,
                min_new_tokens=6,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
            )
            pairs.append([layer.activations for layer in applied.activity()])
        tokens.append(out)
    assert torch.equal(*tokens)
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_prepared_masks_hide_padding(implementation: str) -> None:
    """A 4D mask, as `generate` builds for static caches, hides the same tokens as a 2D one."""
    from transformers.masking_utils import create_causal_mask

    model = tiny("olmoe")
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    embeds = model.get_input_embeddings()(IDS)
    prepared = create_causal_mask(
        config=model.config, inputs_embeds=embeds, attention_mask=mask, past_key_values=None
    )
    assert prepared.dim() == 4
    counts = []
    for given in (mask, prepared):
        with torch.no_grad(), allocmoe.apply(model, plan_for(model)) as applied:
            model.model(IDS, attention_mask=given)
        counts.append([layer.activations for layer in applied.activity()])
    assert counts[0] == counts[1] == [2 * int(mask.sum())] * 4


@pytest.mark.parametrize("family", [*PAPER_FAMILIES, "gpt_oss"])
def test_bfloat16(family: str) -> None:
    model = tiny(family).to(torch.bfloat16)
    with torch.no_grad():
        untouched = model(IDS).logits
        with allocmoe.apply(model, plan_for(model, "100%")):
            assert torch.equal(model(IDS).logits, untouched)
        with allocmoe.apply(model, plan_for(model, "75%")) as applied:
            thinned = model(IDS).logits
    assert thinned.dtype == torch.bfloat16
    assert torch.isfinite(thinned).all()
    expected = round(3 * IDS.numel())
    assert [layer.activations for layer in applied.activity()] == [expected] * len(applied.controls)


@pytest.mark.parametrize("stock", ["eager", "grouped_mm", "batched_mm"])
def test_any_stock_implementation_comes_back(stock: str) -> None:
    model = tiny("olmoe")
    model.set_experts_implementation(stock)
    with torch.no_grad():
        untouched = model(IDS).logits
        with allocmoe.apply(model, plan_for(model)):
            assert model.config._experts_implementation == IMPLEMENTATION
        assert model.config._experts_implementation == stock
        with allocmoe.apply(model, plan_for(model, "100%")):
            assert torch.equal(model(IDS).logits, untouched)


def test_layer_budgets_leave_the_stock_implementation() -> None:
    model = tiny("olmoe")
    stock = model.config._experts_implementation
    with allocmoe.apply(model, plan_for(model, method="uniform")):
        assert model.config._experts_implementation == stock


def test_registered_implementation_skips_ids_out_of_range() -> None:
    model = tiny("olmoe")
    with allocmoe.apply(model, plan_for(model)):
        pass
    layer = inspect_model(model).layers[0]
    hidden = torch.randn(5, 32)
    index = torch.tensor([[0, 8], [1, 2], [8, 8], [3, 0], [7, 8]])
    weights = torch.rand(5, 2)
    with torch.no_grad():
        model.set_experts_implementation("eager")
        expected = layer.experts(hidden, index.clamp(max=7), weights * (index < 8))
        model.set_experts_implementation(IMPLEMENTATION)
        torch.testing.assert_close(layer.experts(hidden, index, weights), expected)


def test_device_map(tmp_path: Path) -> None:
    """Layers placed and offloaded by accelerate give what the plain model gives."""
    from transformers import AutoModelForCausalLM

    tiny("olmoe").save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    device_map: dict[str, Any] = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
    }
    device_map |= {"model.rotary_emb": "cpu"}
    device_map |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    plan = plan_for(plain)
    results = []
    for model in (plain, spread):
        with torch.no_grad(), allocmoe.apply(model, plan) as applied:
            results.append(model(IDS).logits)
        assert [layer.activations for layer in applied.activity()] == [2 * IDS.numel()] * 4
    assert torch.equal(*results)
    text = allocmoe.text_from_ids(IDS)
    profiles = [allocmoe.profile(model, text, batch_size=1).perplexity for model in (plain, spread)]
    assert profiles[0] == profiles[1]


@pytest.mark.parametrize("rule", ["naee", "dynamic-moe"])
def test_threshold_rules_decide_each_token_alone(rule: Any) -> None:
    model = tiny("olmoe")
    text = allocmoe.text_from_ids(torch.randint(3, 128, (8, 32)))
    plan = plan_for(model, method=rule, text=text)
    with torch.no_grad(), allocmoe.apply(model, plan):
        together = model(IDS).logits
        alone = torch.cat([model(IDS[:1]).logits, model(IDS[1:]).logits])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_renormalising_over_more_keeps_weights_smaller() -> None:
    model = tiny("mixtral")
    moe = inspect_model(model)
    seen = []

    def outputs(k2: int | None) -> torch.Tensor:
        token = TokenRule("alloc-t", "batch", 1, None, k2)
        with torch.no_grad(), Controller(moe, token) as controller:
            controller.set_budgets([2.0] * 4)
            hook = moe.layers[0].experts.register_forward_hook(lambda m, a, o: seen.append(o))
            model(IDS)
            hook.remove()
        return seen.pop()

    kept, four = outputs(None), outputs(4)
    # dividing by the mass of all four chosen experts leaves the stock weights as they are
    assert not torch.allclose(kept, four)
    ratio = (kept * four).sum(1) / (four * four).sum(1)
    assert (ratio >= 1 - 1e-5).all()
    with pytest.raises(AllocMoEError, match="does not renormalise"):
        Controller(inspect_model(tiny("olmoe")), TokenRule("alloc-t", "batch", 1, None, 4))


def test_a_second_plan_is_refused_and_the_first_stays() -> None:
    model = tiny("olmoe")
    applied = allocmoe.apply(model, plan_for(model))
    with pytest.raises(AllocMoEError, match="already applied"):
        allocmoe.apply(model, plan_for(model))
    model(IDS)
    assert [layer.activations for layer in applied.activity()] == [2 * IDS.numel()] * 4
    applied.remove()
    applied.remove()
    allocmoe.apply(model, plan_for(model)).remove()


def test_a_plan_of_another_model_is_refused() -> None:
    plan = plan_for(tiny("olmoe"))
    for other, difference in (
        (tiny("olmoe", num_hidden_layers=3), "4 MoE layers, here 3"),
        (tiny("olmoe", top_k=3), "k_orig 4 in MoE layer 0, here 3"),
        (tiny("qwen2_moe"), "family olmoe, here qwen2_moe"),
        (tiny("olmoe", num_experts=16), "num_experts 8 in MoE layer 0, here 16"),
    ):
        with pytest.raises(AllocMoEError, match=difference):
            allocmoe.apply(other, plan)


def test_experts_with_a_dispatch_of_their_own_take_layer_budgets_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("olmoe")
    half = plan_for(model)
    kind = type(model.model.layers[0].mlp.experts)
    monkeypatch.setattr(kind, "__module__", "transformers.integrations.quantised")
    with torch.no_grad(), allocmoe.apply(model, plan_for(model, method="uniform")) as applied:
        model(IDS)
    assert [layer.mean for layer in applied.activity()] == [2] * 4
    with pytest.raises(AllocMoEError, match="no token rule"):
        allocmoe.apply(model, half)
    assert model.config._experts_implementation != IMPLEMENTATION


def test_counting_can_be_left_out() -> None:
    model = tiny("olmoe")
    with torch.no_grad():
        with allocmoe.apply(model, plan_for(model)):
            counted = model(IDS).logits
        with allocmoe.apply(model, plan_for(model), count=False) as applied:
            assert torch.equal(model(IDS).logits, counted)
    assert {layer.tokens for layer in applied.activity()} == {0}


@pytest.mark.parametrize("method", ["uniform", "alloc-t"])
def test_a_plan_applied_in_inference_mode_stays_usable_outside(method: str) -> None:
    model = tiny("olmoe")
    with torch.inference_mode():
        applied = allocmoe.apply(model, plan_for(model, method=method))
        model(IDS)
    with applied, torch.no_grad():
        applied.set_budgets([3] * 4)
        model(IDS)
        assert [layer.activations for layer in applied.activity()] == [5 * IDS.numel()] * 4
        applied.reset()
    assert {layer.forwards for layer in applied.activity()} == {0}


def test_per_layer_k_orig() -> None:
    model = tiny("hunyuan_v1_moe", moe_topk=[4, 3, 2, 1])
    moe = inspect_model(model)
    assert moe.k_orig == (4, 3, 2, 1)
    plan = plan_for(model, "8", "uniform")
    assert plan.layer_budgets == (2, 3, 2, 1)
    with torch.no_grad(), allocmoe.apply(model, plan) as applied:
        model(IDS)
    assert [layer.mean for layer in applied.activity()] == [2, 3, 2, 1]
