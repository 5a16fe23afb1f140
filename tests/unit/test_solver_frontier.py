from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocmoe.errors import AllocMoEError
from allocmoe.solver import Frontier, solve_frontier

Rows = list[list[float]]


def brute_force(cost: Rows, ks: Rows, budget: float) -> tuple[float, float, tuple[float, ...]]:
    """(cost, used, allocation) of the best allocation under the tie rule, by trying all."""
    candidates = []
    for js in itertools.product(*(range(len(row)) for row in ks)):
        allocation = tuple(ks[layer][j] for layer, j in enumerate(js))
        if sum(allocation) <= budget:
            total_cost = sum(cost[layer][j] for layer, j in enumerate(js))
            candidates.append((total_cost, sum(allocation), [-k for k in allocation]))
    best_cost, used, negated = min(candidates)
    return best_cost, used, tuple(-k for k in negated)


def random_ks(rng: np.random.Generator, kind: str, num_layers: int) -> Rows:
    if kind == "same":
        k_orig = int(rng.integers(1, 5))
        return [[float(k) for k in range(1, k_orig + 1)]] * num_layers
    # Steps that a float holds exactly, so that brute force adds them up without error.
    step = 1.0 if kind == "per_layer" else 0.25
    return [
        sorted((step * rng.choice(np.arange(1, 13), rng.integers(1, 5), replace=False)).tolist())
        for _ in range(num_layers)
    ]


@pytest.mark.parametrize("kind", ["same", "per_layer", "fractional"])
@pytest.mark.parametrize("seed", range(50))
def test_integer_costs_match_brute_force_with_ties(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ks = random_ks(rng, kind, int(rng.integers(1, 5)))
    cost = [rng.integers(0, 4, len(row)).astype(float).tolist() for row in ks]
    frontier = solve_frontier(cost, ks)
    for budget in frontier.budgets:
        found = frontier.at(float(budget))
        assert (found.cost, found.used, found.layer_budgets) == brute_force(cost, ks, budget)


@pytest.mark.parametrize("kind", ["same", "per_layer", "fractional"])
@pytest.mark.parametrize("seed", range(50))
def test_real_costs_match_brute_force(kind: str, seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    ks = random_ks(rng, kind, int(rng.integers(1, 5)))
    cost: Rows = [rng.normal(size=len(row)).tolist() for row in ks]
    frontier = solve_frontier(cost, ks)
    assert frontier.budgets[0] == sum(row[0] for row in ks)
    assert frontier.budgets[-1] == sum(row[-1] for row in ks)
    for budget in frontier.budgets:
        found = frontier.at(float(budget))
        best_cost, used, allocation = brute_force(cost, ks, budget)
        assert found.cost == pytest.approx(best_cost, abs=1e-12)
        assert (found.used, found.layer_budgets) == (used, allocation)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Rows, Rows]:
    denominator = draw(st.sampled_from([1, 2, 3, 10]))
    numerators = draw(
        st.lists(st.sets(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=12)
    )
    ks = [[n / denominator for n in sorted(row)] for row in numerators]
    finite = st.floats(-1e6, 1e6)
    cost = [draw(st.lists(finite, min_size=len(row), max_size=len(row))) for row in ks]
    return cost, ks


@settings(deadline=None)
@given(problems())
def test_frontier_properties(problem: tuple[Rows, Rows]) -> None:
    cost, ks = problem
    frontier = solve_frontier(cost, ks)
    assert np.all(frontier.used <= frontier.budgets)
    assert np.all(np.diff(frontier.costs) <= 0)
    assert np.all(np.diff(frontier.used) >= 0)
    np.testing.assert_allclose(frontier.allocations.sum(axis=1), frontier.used)
    index = [dict(zip(row, range(len(row)), strict=True)) for row in ks]
    for allocation, predicted in zip(frontier.allocations, frontier.costs, strict=True):
        chosen = [cost[layer][index[layer][k]] for layer, k in enumerate(allocation)]
        assert sum(chosen) == pytest.approx(predicted, rel=1e-9, abs=1e-6)


def test_dip_leaves_budget_unused() -> None:
    frontier = solve_frontier([[3, 1, 2], [2, 0, 1]], [[1, 2, 3], [1, 2, 3]])
    assert frontier.at(6).layer_budgets == (2, 2)
    assert frontier.at(6).used == 4


def test_ties_prefer_the_smaller_total_then_earlier_layers() -> None:
    flat = solve_frontier([[0, 0], [0, 0]], [[1, 2], [1, 2]])
    assert flat.at(4).layer_budgets == (1, 1)
    symmetric = solve_frontier([[1, 0]] * 3, [[1, 2]] * 3)
    assert symmetric.at(4).layer_budgets == (2, 1, 1)
    assert symmetric.at(5).layer_budgets == (2, 2, 1)


def small_frontier() -> Frontier:
    return solve_frontier([[2, 1, 0]] * 2, [[1, 1.5, 2]] * 2)


def test_at_takes_the_largest_grid_budget_below() -> None:
    frontier = small_frontier()
    np.testing.assert_array_equal(frontier.budgets, [2, 2.5, 3, 3.5, 4])
    assert frontier.at(2.99).used == 2.5
    assert frontier.at(3 - 1e-12).used == 3
    assert frontier.at(100).used == 4


@pytest.mark.parametrize("budget", [1.9, -1, float("nan")])
def test_at_below_the_range(budget: float) -> None:
    with pytest.raises(AllocMoEError, match="from 2 to 4"):
        small_frontier().at(budget)


def test_a_float_beside_the_grid_is_taken_for_the_grid() -> None:
    frontier = solve_frontier([[1, 0]], [[0.1 + 0.2, 1]])
    np.testing.assert_allclose(frontier.budgets, np.arange(3, 11) / 10)


@pytest.mark.parametrize(
    ("cost", "ks", "message"),
    [
        ([], [], "0 layers"),
        ([[1]], [[1], [1]], "1 layers and ks 2"),
        ([[1, 2]], [[1]], "layer 0 has 2 costs for 1"),
        ([[]], [[]], "layer 0 has 0 costs"),
        ([[1, 2]], [[2, 1]], "strictly increasing"),
        ([[1, 2]], [[1, 1]], "strictly increasing"),
        ([[1, 2]], [[0, 1]], "positive"),
        ([[1, 2]], [[1, float("inf")]], "positive"),
        ([[1, 2]], [[1, float("nan")]], "positive"),
        ([[0, 0], [0, float("nan")]], [[1, 2], [1, 2]], "layer 1, k=2: the cost is nan"),
        ([[0, float("inf")]], [[1, 1.5]], "layer 0, k=1.5: the cost is inf"),
        ([[1]], [[3.14159265358979]], "layer 0: k=3.14"),
        ([[1], [1]], [[1 / 997], [1 / 991]], "share no grid"),
    ],
)
def test_bad_input(cost: Rows, ks: Rows, message: str) -> None:
    with pytest.raises(AllocMoEError, match=message):
        solve_frontier(cost, ks)


def test_works_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from allocmoe.solver import solve_frontier\n"
        "assert solve_frontier([[1, 0]], [[1, 2]]).at(2).used == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("seed", range(20))
def test_equal_layers_tie_exactly(seed: int) -> None:
    """Whatever the order in which equal costs are added up: more experts in earlier layers."""
    row = np.random.default_rng(seed).random(5).round(2).tolist()
    frontier = solve_frontier([row] * 6, [[1, 2, 3, 4, 5]] * 6)
    for split in frontier.allocations:
        assert (np.diff(split) <= 0).all(), split


def test_costs_of_any_size() -> None:
    huge = solve_frontier([[1e307, -1e307, 0.0], [1e307, 1e-300, 0.0]], [[1, 2, 3]] * 2)
    assert huge.at(4).layer_budgets == (2, 2)
    tiny = solve_frontier([[3e-310, 1e-310], [2e-310, 1e-310]], [[1, 2]] * 2)
    assert tiny.at(3).layer_budgets == (2, 1)
    assert solve_frontier([[0.0, 0.0]], [[1, 2]]).at(2).layer_budgets == (1,)
