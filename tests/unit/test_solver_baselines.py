from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocmoe.errors import AllocMoEError
from allocmoe.solver import ascending, descending, evolve, solve_frontier, uniform, uniform_mean

k_origs = st.lists(st.integers(1, 8), min_size=1, max_size=40)


@given(k_origs, st.data())
def test_uniform_meets_the_budget_level_by_level(k_orig: list[int], data: st.DataObject) -> None:
    budget = data.draw(st.integers(len(k_orig), sum(k_orig)))
    allocation = uniform(k_orig, budget)
    assert sum(allocation) == budget
    assert all(1 <= k <= most for k, most in zip(allocation, k_orig, strict=True))
    # Only a layer at its own top-k may lie more than one below another.
    for k, most in zip(allocation, k_orig, strict=True):
        assert k == most or k >= max(allocation) - 1


@given(st.integers(1, 40), st.integers(1, 8), st.data())
def test_uniform_differs_by_at_most_one(num_layers: int, k: int, data: st.DataObject) -> None:
    allocation = uniform([k] * num_layers, data.draw(st.integers(num_layers, num_layers * k)))
    assert max(allocation) - min(allocation) <= 1


def test_uniform_spreads_the_remainder_over_depth() -> None:
    assert uniform([6] * 26, 78) == (3,) * 26
    assert uniform([4] * 6, 14) == (2, 2, 3, 2, 2, 3)
    assert uniform([4] * 4, 15) == (3, 4, 4, 4)
    assert uniform([1, 4, 2, 4, 4], 11) == (1, 2, 2, 3, 3)


@given(k_origs, st.floats(0, 1))
def test_uniform_mean_is_one_level_with_caps(k_orig: list[int], position: float) -> None:
    budget = len(k_orig) + position * (sum(k_orig) - len(k_orig))
    means = uniform_mean(k_orig, budget)
    assert sum(means) == pytest.approx(budget, rel=1e-12)
    for mean, most in zip(means, k_orig, strict=True):
        assert mean == most or (mean < most and mean == max(means))


def test_uniform_mean_examples() -> None:
    assert uniform_mean([6] * 4, 14) == (3.5,) * 4
    assert uniform_mean([1, 4, 4], 6) == (1, 2.5, 2.5)
    assert uniform_mean([2, 4, 8], 14) == (2, 4, 8)


@pytest.mark.parametrize("num_layers", range(1, 21))
@pytest.mark.parametrize("k_orig", range(1, 9))
def test_ramps_at_every_feasible_budget(num_layers: int, k_orig: int) -> None:
    for budget in range(num_layers, num_layers * k_orig + 1):
        allocation = ascending([k_orig] * num_layers, budget)
        assert len(allocation) == num_layers
        assert sum(allocation) == budget
        assert allocation[0] >= 1
        assert allocation[-1] <= k_orig
        assert all(0 <= b - a <= 1 for a, b in itertools.pairwise(allocation))
        assert descending([k_orig] * num_layers, budget) == allocation[::-1]


@pytest.mark.parametrize("budget", [130, 104, 78, 52])
def test_ramps_span_one_to_k_orig_at_the_papers_budgets(budget: int) -> None:
    allocation = ascending([6] * 26, budget)
    assert (allocation[0], allocation[-1]) == (1, 6)


def test_ramp_ends_move_only_if_they_must() -> None:
    assert ascending([6] * 26, 91) == tuple(int(1 + i / 5 + 0.5) for i in range(26))
    assert ascending([4] * 6, 21) == (2, 3, 4, 4, 4, 4)  # too much for a ramp from 1
    assert ascending([4] * 6, 8) == (1, 1, 1, 1, 2, 2)  # too little for a ramp to 4 or 3
    assert ascending([8] * 3, 6) == (1, 2, 3)  # too few layers for a ramp to 8
    assert ascending([8], 5) == (5,)


@pytest.mark.parametrize("ramp", [ascending, descending])
def test_ramps_need_one_k_orig(ramp: Callable[..., Any]) -> None:
    with pytest.raises(AllocMoEError, match="same k_orig"):
        ramp([4, 6], 6)


@pytest.mark.parametrize("rule", [uniform, uniform_mean, ascending, descending])
@pytest.mark.parametrize("budget", [3, 25])
def test_infeasible_budgets(rule: Callable[..., Any], budget: int) -> None:
    with pytest.raises(AllocMoEError, match=r"4\.\.24 in total"):
        rule([6] * 4, budget)


def integer_ks(k_orig: list[int]) -> list[range]:
    return [range(1, k + 1) for k in k_orig]


def falling_costs(rng: np.random.Generator, k_orig: list[int]) -> list[list[float]]:
    return [sorted(rng.random(k).tolist(), reverse=True) for k in k_orig]


@pytest.mark.parametrize("seed", range(10))
def test_evolve_keeps_the_budget_and_comes_close(seed: int) -> None:
    rng = np.random.default_rng(seed)
    k_orig = rng.integers(1, 7, size=8).tolist()
    budget = int(rng.integers(len(k_orig), sum(k_orig) + 1))
    cost = falling_costs(rng, k_orig)
    allocation, found = evolve(cost, k_orig, budget, generations=60, seed=seed)
    assert sum(allocation) == budget
    assert all(1 <= k <= most for k, most in zip(allocation, k_orig, strict=True))
    assert found == pytest.approx(sum(cost[layer][k - 1] for layer, k in enumerate(allocation)))
    exact = solve_frontier(cost, integer_ks(k_orig)).at(budget).cost
    assert exact - 1e-9 <= found <= exact + 0.05 * abs(exact)


@pytest.mark.parametrize("seed", range(5))
def test_evolve_never_beats_the_optimum_of_any_costs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.normal(size=(16, 4)).tolist()
    _, found = evolve(cost, [4] * 16, 40, population=20, generations=10, seed=seed)
    assert found >= solve_frontier(cost, integer_ks([4] * 16)).at(40).cost - 1e-9


def test_evolve_is_deterministic_by_seed_and_elitist() -> None:
    cost = falling_costs(np.random.default_rng(0), [6] * 26)
    results = [evolve(cost, [6] * 26, 78, generations=g, seed=3) for g in (0, 5, 20, 20)]
    assert results[2] == results[3]
    assert results[0][1] >= results[1][1] >= results[2][1]
    assert evolve(cost, [6] * 26, 78, generations=0, seed=4) != results[0]


@pytest.mark.parametrize(("k_orig", "budget"), [([1, 1, 1], 3), ([4, 2], 6), ([4, 2], 2), ([3], 2)])
def test_evolve_at_the_edges(k_orig: list[int], budget: int) -> None:
    cost = falling_costs(np.random.default_rng(0), k_orig)
    allocation, _ = evolve(cost, k_orig, budget, population=4, generations=3)
    assert sum(allocation) == budget


def test_evolve_bad_input() -> None:
    with pytest.raises(AllocMoEError, match="out of range"):
        evolve([[1, 0]], [2], 3)
    with pytest.raises(AllocMoEError, match="layer 0, k=2"):
        evolve([[1, float("nan")]], [2], 2)
    with pytest.raises(AllocMoEError, match="layer 0 has 1 costs for 2"):
        evolve([[1]], [2], 2)
    with pytest.raises(AllocMoEError, match="population >= 2"):
        evolve([[1, 0]], [2], 2, population=1)
