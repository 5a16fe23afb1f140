from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from allocmoe.routing import (
    calibrate_dynamic_moe,
    calibrate_naee,
    calibrate_threshold,
    num_pairs,
    reweigh,
    select_batch,
    select_dynamic_moe,
    select_naee,
    select_sequence,
    select_threshold,
    select_top_k,
)
from allocmoe.routing.budget import num_pairs_device

Mask = list[list[bool]]
many = settings(max_examples=300, deadline=None)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


# --- slow, literal references --------------------------------------------------------------------


def alloc_t(scores: list[list[float]], budget: float, k_base: int, valid: list[bool]) -> Mask:
    """The first K_base of each token, then the best of the rest until round(K_l * T) are kept."""
    tokens = [t for t, is_valid in enumerate(valid) if is_valid]
    base = min(k_base, math.floor(budget))
    kept = {(t, k) for t in tokens for k in range(base)}
    rest = [(-scores[t][k], t, k) for t in tokens for k in range(base, len(scores[t]))]
    free = round(budget * len(tokens)) - len(kept)
    kept |= {(t, k) for _, t, k in sorted(rest)[:free]}
    return [[(t, k) in kept for k in range(len(row))] for t, row in enumerate(scores)]


def naee(row: list[float], beta: float) -> list[bool]:
    """Drop the k-th expert if w_k < beta * w_1."""
    return [True] + [not (w < beta * row[0]) for w in row[1:]]


def dynamic_moe(row: list[float], p: float) -> list[bool]:
    """The smallest set whose cumulative score exceeds p, at most all."""
    size, total = 0, 0.0
    while size < len(row) and (size == 0 or total <= p):
        total += row[size]
        size += 1
    return [k < size for k in range(len(row))]


# --- random cases --------------------------------------------------------------------------------


@dataclass
class Case:
    scores: torch.Tensor
    valid: torch.Tensor | None
    num_sequences: int
    budget: float
    k_base: int

    @property
    def K(self) -> int:
        return self.scores.shape[1]

    @property
    def valid_list(self) -> list[bool]:
        return [True] * len(self.scores) if self.valid is None else self.valid.tolist()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Scores of few or many distinct values (sixteenths: exact in every dtype), any padding."""
    num_sequences, length, K = (draw(st.integers(1, n)) for n in (4, 9, 8))
    tokens = num_sequences * length
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    levels = draw(st.sampled_from([1, 2, 4, 16]))
    scores = torch.randint(1, levels + 1, (tokens, K), generator=generator) / 16
    if draw(st.booleans()):  # a selection bias can leave the candidates unsorted
        scores = scores.sort(dim=1, descending=True).values
    padding = draw(st.sampled_from(["no mask", "none", "some", "all", "all but one"]))
    valid = torch.rand(tokens, generator=generator) < 0.6
    if padding in ("none", "all"):
        valid = torch.full((tokens,), padding == "none")
    elif padding == "all but one":
        valid = torch.arange(tokens) == draw(st.integers(0, tokens - 1))
    budget = draw(st.one_of(st.integers(1, K), st.floats(0.01, K), st.sampled_from([0.5, K - 0.5])))
    return Case(
        scores.to(draw(st.sampled_from(DTYPES))),
        None if padding == "no mask" else valid,
        num_sequences,
        budget,
        draw(st.integers(0, K)),
    )


# --- Alloc-T, pooled -----------------------------------------------------------------------------


@many
@given(cases())
def test_batch_scope_is_the_literal_rule(c: Case) -> None:
    keep = select_batch(c.scores, c.budget, c.k_base, c.valid)
    assert keep.tolist() == alloc_t(c.scores.tolist(), c.budget, c.k_base, c.valid_list)
    assert int(keep.sum()) == round(c.budget * sum(c.valid_list))
    if c.valid is not None:
        assert not keep[~c.valid].any()


@many
@given(cases())
def test_sequence_scope_is_the_literal_rule_within_each_sequence(c: Case) -> None:
    keep = select_sequence(c.scores, c.budget, c.num_sequences, c.k_base, c.valid)
    length = len(c.scores) // c.num_sequences
    for start in range(0, len(c.scores), length):
        part = slice(start, start + length)
        expected = alloc_t(c.scores[part].tolist(), c.budget, c.k_base, c.valid_list[part])
        assert keep[part].tolist() == expected
        assert int(keep[part].sum()) == round(c.budget * sum(c.valid_list[part]))


@many
@given(cases(), st.data())
def test_padding_changes_nothing_for_the_other_tokens(c: Case, data: st.DataObject) -> None:
    if c.valid is None:
        return
    seed = data.draw(st.integers(0, 2**32))
    noise = torch.rand(c.scores.shape, generator=torch.Generator().manual_seed(seed))
    scores = torch.where(c.valid[:, None], c.scores, noise.to(c.scores.dtype))
    scores[~c.valid, -1] = float("nan")
    for pools in (1, c.num_sequences):
        keep = select_sequence(c.scores, c.budget, pools, c.k_base, c.valid)
        assert torch.equal(select_sequence(scores, c.budget, pools, c.k_base, c.valid), keep)
    alone = select_batch(c.scores[c.valid], c.budget, c.k_base)
    assert torch.equal(select_batch(c.scores, c.budget, c.k_base, c.valid)[c.valid], alone)


@many
@given(cases(), st.data())
def test_special_budgets(c: Case, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, c.K))
    valid = torch.tensor(c.valid_list)[:, None]
    for pools in (1, c.num_sequences):
        plain = select_sequence(c.scores, k, pools, k_base=k, valid_T=c.valid)
        assert torch.equal(plain, (torch.arange(c.K) < k) & valid)
        assert torch.equal(plain, select_top_k(c.scores, k, c.valid))
        # K_base beyond the budget is cut to it
        assert torch.equal(select_sequence(c.scores, k, pools, c.K, c.valid), plain)
        full = select_sequence(c.scores, c.K, pools, c.k_base, c.valid)
        assert torch.equal(full, valid.expand(-1, c.K))


def test_ties_go_to_the_earlier_token_then_to_the_better_rank() -> None:
    scores = torch.full((3, 3), 0.25)
    assert select_batch(scores, 5 / 3).tolist() == [
        [True, True, True],
        [True, False, False],
        [True, False, False],
    ]
    assert select_batch(scores, 4 / 3, k_base=0).tolist() == [
        [True, True, True],
        [True, False, False],
        [False, False, False],
    ]


def test_no_tokens_at_all() -> None:
    none = torch.empty(0, 4)
    for keep in (select_batch(none, 2.5), select_threshold(none, 2.5, 0.1), select_naee(none, 0.5)):
        assert keep.shape == (0, 4)


@many
@given(st.floats(0, 256), st.integers(0, 100_000))
def test_pairs_are_counted_alike_on_host_and_device(budget: float, tokens: int) -> None:
    for k in (budget, round(budget * 2) / 2):  # halves meet the rule for ties in rounding
        assert int(num_pairs_device(k, torch.tensor(tokens))) == num_pairs(k, tokens)


# --- rules with a threshold ----------------------------------------------------------------------

sixteenths = st.integers(0, 24).map(lambda n: n / 16)


@many
@given(cases(), sixteenths)
def test_threshold_scope_is_the_literal_rule(c: Case, threshold: float) -> None:
    keep = select_threshold(c.scores, c.budget, threshold, c.k_base, c.valid)
    base = min(c.k_base, math.floor(c.budget))
    rows = zip(c.scores.tolist(), c.valid_list, strict=True)
    assert keep.tolist() == [
        [valid and (k < base or score > threshold) for k, score in enumerate(row)]
        for row, valid in rows
    ]


@many
@given(cases(), sixteenths)
def test_naee_is_the_literal_rule(c: Case, beta: float) -> None:
    keep = select_naee(c.scores, beta, c.valid)
    rows = zip(c.scores.tolist(), c.valid_list, strict=True)
    assert keep.tolist() == [[valid and k for k in naee(row, beta)] for row, valid in rows]


@many
@given(cases(), st.integers(0, 140).map(lambda n: n / 16))
def test_dynamic_moe_is_the_literal_rule(c: Case, p: float) -> None:
    keep = select_dynamic_moe(c.scores, p, c.valid)
    rows = zip(c.scores.tolist(), c.valid_list, strict=True)
    assert keep.tolist() == [[valid and k for k in dynamic_moe(row, p)] for row, valid in rows]


THRESHOLD_RULES: dict[str, Callable[..., torch.Tensor]] = {
    "alloc-t": lambda scores, valid=None: select_threshold(scores, 3.3, 0.1, 2, valid),
    "naee": lambda scores, valid=None: select_naee(scores, 0.6, valid),
    "dynamic-moe": lambda scores, valid=None: select_dynamic_moe(scores, 0.4, valid),
}


@pytest.mark.parametrize("name", THRESHOLD_RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_threshold_decides_each_token_alone(name: str, dtype: torch.dtype) -> None:
    select = THRESHOLD_RULES[name]
    scores = torch.randn(37, 6, generator=torch.Generator().manual_seed(0)).softmax(1)
    scores = scores.sort(dim=1, descending=True).values.to(dtype)
    together = select(scores)
    assert 37 < int(together.sum()) < 37 * 6
    for t in range(37):
        assert torch.equal(select(scores[t : t + 1]), together[t : t + 1])
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1))
    assert torch.equal(select(scores[order]), together[order])
    valid = torch.arange(37) % 3 > 0
    assert torch.equal(select(scores, valid), together & valid[:, None])


# --- calibration meets the budget ----------------------------------------------------------------


def distinct(N: int, K: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """N * K different numbers in (0, 1), each row sorted."""
    shuffled = torch.randperm(N * K, generator=torch.Generator().manual_seed(seed)) + 1
    return (shuffled.view(N, K) / (N * K + 1)).sort(dim=1, descending=True).values.to(dtype)


sizes = given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**32), st.data())


@many
@sizes
def test_calibrated_threshold_keeps_the_budget(
    N: int, K: int, seed: int, data: st.DataObject
) -> None:
    scores = distinct(N, K, seed)
    budget, k_base = data.draw(st.floats(0.01, K)), data.draw(st.integers(0, K))
    threshold = calibrate_threshold(scores, budget, k_base)
    keep = select_threshold(scores, budget, threshold, k_base)
    assert int(keep.sum()) == round(budget * N)
    # without ties a threshold set on the same tokens chooses what the pool chooses
    assert torch.equal(keep, select_batch(scores, budget, k_base))


@many
@sizes
def test_calibrated_naee_is_the_quantile_of_pooled_ratios(
    N: int, K: int, seed: int, data: st.DataObject
) -> None:
    first = 0.5 ** torch.randint(0, 3, (N, 1), generator=torch.Generator().manual_seed(seed))
    ratios = distinct(N, K - 1, seed)
    scores = first * torch.cat([torch.ones(N, 1), ratios], dim=1)
    budget = data.draw(st.floats(1, K))
    count = round(budget * N) - N
    beta = calibrate_naee(scores, budget)
    if K > 1:
        ordered = sorted(ratios.flatten().tolist(), reverse=True)
        assert all(ratio > beta for ratio in ordered[:count])
        assert all(ratio < beta for ratio in ordered[count:])
    assert int(select_naee(scores, beta).sum()) == round(budget * N)


@many
@given(st.integers(1, 30), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_calibrated_dynamic_moe_keeps_the_budget_over_all_layers(
    N: int, Ks: list[int], data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    layers = [
        torch.randn(N, 8, generator=generator, dtype=torch.float64).softmax(1).topk(K).values
        for K in Ks
    ]
    most = N * (sum(Ks) - len(Ks))
    budget = len(Ks) + data.draw(st.integers(0, most)) / N
    p = calibrate_dynamic_moe(layers, budget)
    realised = sum(int(select_dynamic_moe(scores, p).sum()) for scores in layers)
    assert realised == round(budget * N)


def test_calibration_at_a_tie_stays_within_the_tied() -> None:
    scores = torch.tensor([[1.0, 0.5, 0.25], [1.0, 0.5, 0.25], [1.0, 0.5, 0.25]])
    keep = select_threshold(scores, 4 / 3, calibrate_threshold(scores, 4 / 3))
    assert int(keep.sum()) in (3, 6)
    assert not keep[:, 2].any()


# --- weights -------------------------------------------------------------------------------------


@many
@given(cases(), st.sampled_from([1.0, 2.5]), st.data())
def test_reweigh_renormalises_over_the_reference_set(
    c: Case, scale: float, data: st.DataObject
) -> None:
    scores = c.scores.double()
    weights = (scale * scores / scores.sum(1, keepdim=True)).float()
    keep = select_batch(c.scores, c.budget, c.k_base, c.valid)
    k2 = data.draw(st.integers(1, c.K))
    over_kept = reweigh(weights, c.scores, keep)
    over_k2 = reweigh(weights, c.scores, keep, renormalise_over=k2)
    for t, row in enumerate(scores.tolist()):
        kept = [k for k in range(c.K) if keep[t, k]]
        for k in kept:
            mass = sum(row[j] for j in kept)
            assert float(over_kept[t, k]) == pytest.approx(scale * row[k] / mass, rel=1e-6)
            assert float(over_k2[t, k]) == pytest.approx(scale * row[k] / sum(row[:k2]), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reweigh_of_everything_leaves_the_bits(dtype: torch.dtype) -> None:
    scores = torch.randn(19, 5, generator=torch.Generator().manual_seed(3)).softmax(1)
    weights = (scores / scores.sum(1, keepdim=True)).to(dtype)
    for k2 in (None, 5, 8):
        same = reweigh(weights, scores, torch.ones(19, 5, dtype=torch.bool), k2)
        assert same.dtype == dtype
        assert torch.equal(same.float(), weights.float())


# --- all rules -----------------------------------------------------------------------------------

ALL_RULES: dict[str, Callable[..., torch.Tensor]] = {
    **THRESHOLD_RULES,
    "top-k": lambda scores, valid=None: select_top_k(scores, 2, valid),
    "batch": lambda scores, valid=None: select_batch(scores, 2.3, 1, valid),
    "sequence": lambda scores, valid=None: select_sequence(scores, 2.3, 3, 1, valid),
}


@pytest.mark.parametrize("name", ALL_RULES)
@pytest.mark.parametrize("masked", [False, True])
def test_same_scores_same_mask_and_the_input_stays(name: str, masked: bool) -> None:
    scores = distinct(21, 5, seed=4).round(decimals=1)  # many ties
    valid = torch.arange(21) % 4 > 0 if masked else None
    before = scores.clone()
    keep = ALL_RULES[name](scores, valid).clone()
    assert torch.equal(scores, before)
    for _ in range(3):
        assert torch.equal(ALL_RULES[name](scores, valid), keep)
    column_major = scores.T.contiguous().T
    assert torch.equal(ALL_RULES[name](column_major, valid), keep)


class NoCopies(TorchFunctionMode):
    """Refuses tensors made from host values: copying them to a device makes the host wait."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in ("tensor", "as_tensor", "new_tensor", "to", "cpu", "cuda")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ALL_RULES)
@pytest.mark.parametrize("masked", [False, True])
def test_no_rule_makes_the_host_wait(name: str, masked: bool) -> None:
    # a meta tensor has no values: .item(), bool() or nonzero() on it raise
    scores = torch.empty(21, 5, device="meta")
    valid = torch.empty(21, dtype=torch.bool, device="meta") if masked else None
    with NoCopies():
        keep = ALL_RULES[name](scores, valid)
    assert (keep.shape, keep.dtype, keep.device.type) == ((21, 5), torch.bool, "meta")
    assert reweigh(scores, scores, keep).shape == (21, 5)
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(keep.any())


def test_a_threshold_between_neighbouring_floats_still_tells_them_apart() -> None:
    one = torch.tensor(1.0)
    x = torch.tensor(0.25)
    y = torch.nextafter(x, one)
    z = torch.nextafter(y, one)
    scores = torch.stack([torch.stack([one, y]), torch.stack([one, z])])
    assert select_threshold(scores, 1.5, calibrate_threshold(scores, 1.5)).sum() == 3
    scores = torch.stack([torch.stack([one, x]), torch.stack([one, y])])
    assert select_naee(scores, calibrate_naee(scores, 1.5)).sum() == 3
