"""The exact optimum for every budget, by one dynamic program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from allocmoe.errors import AllocMoEError
from allocmoe.solver.budget import SLACK

# The finest grid is 1/1000 activation: far finer than any measurement, and the DP stays small.
MAX_DENOMINATOR = 1000
# What every sum of costs fits in, and the cost of a total that no allocation has.
_BITS = 61
_UNREACHABLE = np.int64(2**62)


@dataclass(frozen=True)
class Allocation:
    """One budget's optimum: activations per token of each layer, their total, their cost."""

    layer_budgets: tuple[float, ...]
    used: float
    cost: float


@dataclass(frozen=True, eq=False)
class Frontier:
    """The optimum for every budget on the grid, N budgets over L layers.

    budgets      [N]    every total from the smallest possible to the largest
    costs        [N]    the least cost of any allocation with total <= budget
    used         [N]    the total that the optimum really uses
    allocations  [N, L] activations per token of each layer
    """

    budgets: NDArray[np.float64]
    costs: NDArray[np.float64]
    used: NDArray[np.float64]
    allocations: NDArray[np.float64]

    def at(self, budget: float) -> Allocation:
        """The optimum at the largest grid budget that does not exceed `budget`."""
        least, most = self.budgets[0], self.budgets[-1]
        # Written so that NaN fails.
        if not budget >= least - SLACK:
            raise AllocMoEError(
                f"budget {budget:g} is below the smallest possible total: "
                f"the frontier runs from {least:g} to {most:g}"
            )
        i = int(np.searchsorted(self.budgets, budget + SLACK, side="right")) - 1
        return Allocation(
            layer_budgets=tuple(self.allocations[i].tolist()),
            used=float(self.used[i]),
            cost=float(self.costs[i]),
        )


def solve_frontier(cost: Sequence[Sequence[float]], ks: Sequence[Sequence[float]]) -> Frontier:
    """min over j of sum_l cost[l][j_l]  subject to  sum_l ks[l][j_l] <= B, for every B.

    cost[l][j]: the cost of giving layer l ks[l][j] activations per token; any finite number, it
    need not fall with k. ks[l]: strictly increasing, positive, not necessarily integers.

    The exact grouped knapsack, over layers from last to first:

        best[l][t] = min_j ( cost[l][j] + best[l+1][t - k_lj] ),   best[L][0] = 0

    best[l][t]: the least cost of layers l..L-1 with total exactly t. k_lj: ks[l][j] in grid units.

    Ties: the smaller total, then more experts in earlier layers.
    """
    check_costs(cost, ks)
    k_units, denominator = to_grid(ks)
    # Count every layer from its smallest k, so that index 0 is the smallest total.
    extras = [[k - row[0] for k in row] for row in k_units]

    best = np.zeros(1, dtype=np.int64)
    choices: list[NDArray[np.intp]] = []
    for layer_cost, layer_extras in zip(reversed(_to_whole(cost)), reversed(extras), strict=True):
        best, choice = _prepend_layer(layer_cost, layer_extras, best)
        choices.insert(0, choice)

    used = _best_up_to(best)
    num_budgets = len(best)
    assert np.all(used <= np.arange(num_budgets)), "an allocation exceeds its budget"

    # Walk forward for all budgets at once; `left` is the total still to hand out.
    left = used.copy()
    allocations = np.empty((num_budgets, len(ks)))
    costs = np.zeros(num_budgets)
    for layer, choice in enumerate(choices):
        j = choice[left]
        allocations[:, layer] = np.asarray(ks[layer], dtype=np.float64)[j]
        costs += np.asarray(cost[layer], dtype=np.float64)[j]
        left -= np.asarray(extras[layer])[j]
    assert not left.any(), "an allocation does not use the total its cost belongs to"

    least = sum(row[0] for row in k_units)
    return Frontier(
        budgets=(least + np.arange(num_budgets)) / denominator,
        costs=costs,
        used=(least + used) / denominator,
        allocations=allocations,
    )


def check_costs(cost: Sequence[Sequence[float]], ks: Sequence[Sequence[float]]) -> None:
    """Raise unless cost has one finite entry for each k, and each ks[l] increases from above 0."""
    if len(ks) == 0 or len(cost) != len(ks):
        raise AllocMoEError(f"cost has {len(cost)} layers and ks {len(ks)}: need one row per layer")
    for layer, (layer_cost, layer_ks) in enumerate(zip(cost, ks, strict=True)):
        if len(layer_ks) == 0 or len(layer_cost) != len(layer_ks):
            raise AllocMoEError(
                f"layer {layer} has {len(layer_cost)} costs for {len(layer_ks)} values of k"
            )
        lower = [0.0, *layer_ks[:-1]]
        if not all(a < b < math.inf for a, b in zip(lower, layer_ks, strict=True)):
            raise AllocMoEError(
                f"layer {layer}: k must be positive and strictly increasing: {list(layer_ks)}"
            )
        for c, k in zip(layer_cost, layer_ks, strict=True):
            if not math.isfinite(c):
                raise AllocMoEError(f"layer {layer}, k={k:g}: the cost is {c}, not a finite number")


def to_grid(ks: Sequence[Sequence[float]]) -> tuple[list[list[int]], int]:
    """Every k as a whole number of 1/denominator; the denominator is the least common one."""
    exact = [[Fraction(float(k)).limit_denominator(MAX_DENOMINATOR) for k in row] for row in ks]
    for layer, (row, exact_row) in enumerate(zip(ks, exact, strict=True)):
        for k, fraction in zip(row, exact_row, strict=True):
            if abs(float(fraction) - k) > SLACK:
                raise AllocMoEError(
                    f"layer {layer}: k={k!r} is no fraction with a denominator "
                    f"of at most {MAX_DENOMINATOR}; round it"
                )
    denominator = math.lcm(*(fraction.denominator for row in exact for fraction in row))
    if denominator > MAX_DENOMINATOR:
        raise AllocMoEError(
            f"the values of k share no grid of 1/{MAX_DENOMINATOR} or coarser: round them"
        )
    return [[int(fraction * denominator) for fraction in row] for row in exact], denominator


def _to_whole(cost: Sequence[Sequence[float]]) -> list[list[int]]:
    """The costs as whole numbers of 2**-n, as fine as their sums fit.

    Sums of floats hang on their order, and equal ones would tie by chance.
    """
    exact = [[Fraction(float(c)) for c in row] for row in cost]
    most = sum(max(map(abs, row)) for row in exact)
    # most < 2 ** (the difference of their lengths + 1)
    bits = most.numerator.bit_length() - most.denominator.bit_length() + 1
    return [[round(c * Fraction(2) ** (_BITS - bits)) for c in row] for row in exact]


def _prepend_layer(
    layer_cost: Sequence[int], layer_extras: Sequence[int], best_after: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """best[l] and the j behind each entry, from best[l+1]."""
    num_after = len(best_after)
    best = np.full(num_after + layer_extras[-1], _UNREACHABLE)
    choice = np.zeros(len(best), dtype=np.intp)
    # From the largest k down, so that a tie keeps the larger k in the earlier layer.
    for j in reversed(range(len(layer_cost))):
        window = slice(layer_extras[j], layer_extras[j] + num_after)
        candidate = np.where(best_after < _UNREACHABLE, layer_cost[j] + best_after, _UNREACHABLE)
        better = candidate < best[window]
        best[window][better] = candidate[better]
        choice[window][better] = j
    return best, choice


def _best_up_to(best: NDArray[np.int64]) -> NDArray[np.intp]:
    """The smallest t <= b with the least best[t], for every b."""
    least = np.minimum.accumulate(best)
    improves = np.ones(len(best), dtype=bool)
    improves[1:] = least[1:] < least[:-1]
    return np.maximum.accumulate(np.where(improves, np.arange(len(best)), 0))
