from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from allocmoe.kernels import Pairs, compact, run_experts
from allocmoe.kernels.reference import run_experts_reference
from allocmoe.models import inspect_model
from tiny import available, tiny

# family -> (config keys that make sizes odd, what is special about its experts)
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "olmoe": (dict(intermediate_size=13, num_experts=7), "plain"),
    "gpt_oss": (dict(intermediate_size=13), "bias, transposed, interleaved gate"),
    "aria": (dict(intermediate_size=13), "transposed"),
    "nemotron_h": (dict(moe_intermediate_size=13), "ungated"),
    "muse_spark": (dict(moe_intermediate_size=13), "norm after each expert"),
}
families = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def _experts(family: str) -> Any:
    return inspect_model(tiny(family, **FAMILIES[family][0])).layers[1].experts


def experts(family: str, dtype: torch.dtype = torch.float32) -> Any:
    if family not in available():
        pytest.skip(f"the installed transformers has no {family}")
    return copy.deepcopy(_experts(family)).to(dtype)


def hidden_size(module: Any) -> int:
    return int(module.down_proj.shape[2 if module.is_transposed else 1])


def routing(
    module: Any, T: int, K: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random hidden states, K different experts for each token, and their weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, hidden_size(module), generator=generator).to(dtype)
    index = torch.rand(T, module.num_experts, generator=generator).argsort(1)[:, :K]
    return hidden, index, torch.rand(T, K, generator=generator)


def random_keep(T: int, K: int, share: float, seed: int) -> torch.Tensor:
    return torch.rand(T, K, generator=torch.Generator().manual_seed(seed)) < share


# T, K, share of kept pairs
SHAPES = [(1, 1, 1.0), (1, 4, 0.5), (2, 3, 0.5), (5, 1, 0.6), (13, 4, 0.3), (67, 5, 0.7), (9, 3, 0)]


@torch.no_grad()
@families
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_definition(family: str, shape: tuple[int, int, float]) -> None:
    T, K, share = shape
    module = experts(family)
    hidden, index, weights = routing(module, T, K, seed=T)
    pairs = compact(index, weights, random_keep(T, K, share, seed=T + 1))
    out = run_experts(module, hidden, pairs, T)
    expected = run_experts_reference(module, hidden, pairs, T)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@families
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_stays_near_the_definition(family: str, weights_dtype: torch.dtype) -> None:
    module = experts(family, torch.bfloat16)
    hidden, index, weights = routing(module, 23, 4, seed=0, dtype=torch.bfloat16)
    pairs = compact(index, weights.to(weights_dtype), random_keep(23, 4, 0.6, seed=1))
    out = run_experts(module, hidden, pairs, 23)
    assert out.dtype == torch.bfloat16
    exact = run_experts_reference(module.float(), hidden.float(), pairs, 23)
    error = (out.float() - exact).norm() / exact.norm()
    assert error < 0.02


@torch.no_grad()
@families
def test_everything_kept_equals_transformers_own_loop(family: str) -> None:
    module = experts(family)
    hidden, index, weights = routing(module, 29, 4, seed=2)
    pairs = compact(index, weights, torch.ones(29, 4, dtype=torch.bool))
    eager = type(module).forward.__wrapped__
    torch.testing.assert_close(
        run_experts(module, hidden, pairs, 29),
        eager(module, hidden, index, weights),
        rtol=1e-5,
        atol=1e-6,
    )


@torch.no_grad()
@families
@pytest.mark.parametrize("chosen", [0, 3, -1])
def test_all_tokens_at_one_expert(family: str, chosen: int) -> None:
    module = experts(family)
    hidden, index, weights = routing(module, 11, 1, seed=3)
    index = torch.full_like(index, chosen % module.num_experts)
    pairs = compact(index, weights, torch.ones(11, 1, dtype=torch.bool))
    out = run_experts(module, hidden, pairs, 11)
    expected = run_experts_reference(module, hidden, pairs, 11)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@families
@pytest.mark.parametrize("share", [0.0, 0.15, 0.3])
def test_dropped_experts_are_never_touched(family: str, share: float) -> None:
    module = experts(family)
    hidden, index, weights = routing(module, 6, 4, seed=4)
    keep = random_keep(6, 4, share, seed=5)
    pairs = compact(index, weights, keep)
    clean = run_experts(module, hidden, pairs, 6)
    unused = sorted(set(range(module.num_experts)) - set(pairs.expert.tolist()))
    assert unused
    for name in ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        if hasattr(module, name):
            getattr(module, name)[unused] = float("nan")
    # neither are tokens or weights of which nothing is kept
    hidden[~keep.any(1)] = float("nan")
    weights[~keep] = float("nan")
    pairs = compact(index, weights, keep)
    assert torch.equal(run_experts(module, hidden, pairs, 6), clean)
    assert torch.isfinite(clean).all()


@torch.no_grad()
@families
def test_a_token_that_keeps_nothing_gets_zero(family: str) -> None:
    module = experts(family)
    hidden, index, weights = routing(module, 7, 3, seed=6)
    keep = torch.arange(7)[:, None].expand(7, 3) % 2 == 0
    out = run_experts(module, hidden, compact(index, weights, keep), 7)
    assert not out[1::2].any()
    assert out[::2].any(dim=1).all()


def fields(pairs: Pairs) -> list[torch.Tensor]:
    return [pairs.slot, pairs.expert, pairs.weight]


@pytest.mark.parametrize("shape", SHAPES)
def test_compact_lists_the_kept_pairs_by_expert_then_token(shape: tuple[int, int, float]) -> None:
    T, K, share = shape
    _, index, weights = routing(experts("olmoe"), T, K, seed=7)
    keep = random_keep(T, K, share, seed=8)
    expected = sorted(
        (int(index[t, k]), t * K + k, float(weights[t, k]))
        for t in range(T)
        for k in range(K)
        if keep[t, k]
    )
    pairs = compact(index, weights, keep)
    found = zip(pairs.expert.tolist(), pairs.slot.tolist(), pairs.weight.tolist(), strict=True)
    assert list(found) == expected
    counted = compact(index, weights, keep, num_kept=int(keep.sum()))
    assert pairs.num_columns == counted.num_columns == K
    for one, other in zip(fields(pairs), fields(counted), strict=True):
        assert torch.equal(one, other)


def test_compact_with_a_known_count_asks_the_device_for_nothing() -> None:
    index = torch.empty(5, 3, dtype=torch.long, device="meta")
    weights = torch.empty(5, 3, device="meta")
    keep = torch.empty(5, 3, dtype=torch.bool, device="meta")
    pairs = compact(index, weights, keep, num_kept=4)
    assert [field.shape for field in fields(pairs)] == [(4,)] * 3


@torch.no_grad()
@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_input_same_bits(family: str, dtype: torch.dtype) -> None:
    module = experts(family, dtype)
    hidden, index, weights = routing(module, 31, 4, seed=9, dtype=dtype)
    keep = random_keep(31, 4, 0.5, seed=10)
    first = run_experts(module, hidden, compact(index, weights, keep), 31)
    for num_kept in (None, int(keep.sum())):
        again = run_experts(module, hidden, compact(index, weights, keep, num_kept), 31)
        assert torch.equal(again, first)


@families
def test_gradients_flow_as_through_the_definition(family: str) -> None:
    module = experts(family)
    keep = random_keep(8, 3, 0.6, seed=11)
    grads = []
    for run in (run_experts, run_experts_reference):
        module.zero_grad()
        hidden, index, weights = routing(module, 8, 3, seed=12)
        hidden.requires_grad_()
        weights.requires_grad_()
        run(module, hidden, compact(index, weights, keep), 8).square().sum().backward()
        grads.append([hidden.grad, weights.grad, *(p.grad for p in module.parameters())])
    for ours, theirs in zip(*grads, strict=True):
        assert ours.any()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
