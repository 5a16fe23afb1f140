"""What must hold on every supported family, on tiny random models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from allocmoe.artifacts import TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.models import FAMILIES, REFUSED, MoEModel, inspect_model
from allocmoe.runtime.hf import Controller
from tiny import FAMILIES as TINY
from tiny import available, tiny

SUPPORTED = [name for name in available() if name in FAMILIES]
NAMED = (
    "deepseek_v2 qwen2_moe olmoe mixtral qwen3_moe deepseek_v3 glm4_moe gpt_oss granitemoe phimoe "
    "ernie4_5_moe minimax jamba hunyuan_v1_moe dots1 lfm2_moe qwen3_next"
)
# the config's own smaller k does nothing (phimoe), or is one for all layers and set elsewhere
OWN_K_BY_MASK = {"phimoe", "gemma4"}

torch.manual_seed(0)
IDS = torch.randint(3, 128, (3, 17))
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0
MASK[2, :9] = 0


@pytest.fixture(scope="module", params=SUPPORTED)
def moe(request: pytest.FixtureRequest) -> MoEModel:
    return inspect_model(tiny(request.param))


def logits(moe: MoEModel, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = moe.model(IDS, use_cache=False, **kwargs).logits
    return out


def trace(model: torch.nn.Module) -> dict[str, Any]:
    """Everything about a model that a plan could leave behind."""
    return {
        name: (
            set(module.__dict__),
            getattr(module, "top_k", None),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            getattr(getattr(module, "config", None), "_experts_implementation", None),
        )
        for name, module in model.named_modules()
    }


def test_named_families_are_tested_here() -> None:
    assert set(NAMED.split()) <= set(SUPPORTED)
    assert {name for name, family in FAMILIES.items() if family.tested} == set(TINY) - set(REFUSED)


@pytest.mark.parametrize(
    "token",
    [TokenRule(), TokenRule("alloc-t", "batch"), TokenRule("alloc-t", "sequence")],
    ids=lambda token: token.label,
)
def test_full_budget_is_the_untouched_model(moe: MoEModel, token: TokenRule) -> None:
    untouched = logits(moe)
    before = trace(moe.model)
    with Controller(moe, token) as controller:
        controller.set_budgets(moe.k_orig)
        assert torch.equal(logits(moe), untouched)
        assert [a.activations for a in controller.activity()] == [
            k * IDS.numel() for k in moe.k_orig
        ]
    assert trace(moe.model) == before
    assert torch.equal(logits(moe), untouched)


def test_uniform_equals_the_configs_own_smaller_k(moe: MoEModel) -> None:
    for k in range(1, max(moe.k_orig)):
        if moe.info.family == "phimoe":
            expected = phimoe_with_one_expert(moe)
        else:
            own = tiny(moe.info.family, top_k=k)
            own.load_state_dict(moe.model.state_dict())
            expected = own(IDS, use_cache=False).logits
        with Controller(moe, TokenRule()) as controller:
            controller.set_budgets([k] * len(moe.layers))
            got = logits(moe)
            assert [a.mean for a in controller.activity()] == [k] * len(moe.layers)
        if moe.info.family in OWN_K_BY_MASK:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(got, expected)


def phimoe_with_one_expert(moe: MoEModel) -> torch.Tensor:
    """Its sparsemixer cannot return one expert, so the second one's weight is set to 0."""
    model = copy.deepcopy(moe.model)
    for layer in inspect_model(model).layers:

        def first_only(module: Any, args: Any, output: Any) -> Any:
            scores, weights, index = output
            return scores, weights * torch.tensor([1.0, 0.0]), index

        layer.router.register_forward_hook(first_only)
    with torch.no_grad():
        out: torch.Tensor = model(IDS, use_cache=False).logits
    return out


def test_a_base_of_the_whole_budget_is_plain_top_k(moe: MoEModel) -> None:
    k = max(1, max(moe.k_orig) - 1)
    results = []
    for token in (TokenRule(), TokenRule("alloc-t", "batch", k_base=k)):
        with Controller(moe, token) as controller:
            controller.set_budgets([k] * len(moe.layers))
            results.append(logits(moe))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_alloc_t_runs_exactly_its_pairs(moe: MoEModel, scope: Any, padded: bool) -> None:
    lengths = MASK.sum(1).tolist() if padded else [IDS.shape[1]] * len(IDS)
    kwargs = {"attention_mask": MASK} if padded else {}
    for share in (0.3, 0.55, 0.8):
        budgets = [1 + share * (k - 1) for k in moe.k_orig]
        with Controller(moe, TokenRule("alloc-t", scope)) as controller:
            controller.set_budgets(budgets)
            assert torch.isfinite(logits(moe, **kwargs)).all()
            activity = controller.activity()
        pools = [sum(lengths)] if scope == "batch" else lengths
        expected = [sum(round(b * tokens) for tokens in pools) for b in budgets]
        assert [a.activations for a in activity] == expected
        assert {a.tokens for a in activity} == {sum(lengths)}
        assert {a.padding_activations for a in activity} == {0}


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_padding_does_not_change_what_tokens_get(moe: MoEModel, scope: Any) -> None:
    """A left-padded sequence alone gets the same logits as without its padding."""
    row, pad = IDS[:1], 6
    padded = torch.cat([torch.zeros(1, pad, dtype=torch.long), row], 1)
    mask = torch.cat([torch.zeros(1, pad, dtype=torch.long), torch.ones_like(row)], 1)
    with torch.no_grad():
        stock = (
            moe.model(padded, attention_mask=mask).logits[:, pad:] - moe.model(row).logits
        ).abs()
        if stock.max() > 1e-3:
            pytest.skip("the unmodified model itself depends on padding")
        with Controller(moe, TokenRule("alloc-t", scope)) as controller:
            controller.set_budgets([1 + 0.4 * (k - 1) for k in moe.k_orig])
            plain = moe.model(row).logits
            with_padding = moe.model(padded, attention_mask=mask).logits[:, pad:]
    torch.testing.assert_close(with_padding, plain, rtol=1e-3, atol=1e-3)


def test_generate_spends_the_budget(moe: MoEModel) -> None:
    budgets = [float(max(1, k // 2)) for k in moe.k_orig]
    with Controller(moe, TokenRule("alloc-t", "batch")) as controller:
        controller.set_budgets(budgets)
        out = moe.model.generate(
            IDS, attention_mask=MASK, max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
        activity = controller.activity()
    assert out.shape == (3, 21)
    # the prompt without its padding, then three tokens fed back for each of three sequences
    tokens = int(MASK.sum()) + 3 * 3
    assert [(a.tokens, a.activations) for a in activity] == [(tokens, b * tokens) for b in budgets]


@pytest.mark.parametrize("family", [name for name in available() if name in REFUSED])
def test_refused_by_name_with_the_reason(family: str) -> None:
    with pytest.raises(AllocMoEError, match=f"{family} is not supported") as refusal:
        inspect_model(tiny(family))
    assert REFUSED[family] in str(refusal.value)
