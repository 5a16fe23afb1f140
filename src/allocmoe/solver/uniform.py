"""The Uniform baseline: the same number of experts in all layers."""

from __future__ import annotations

from collections.abc import Sequence

from allocmoe.solver.budget import check_budget


def uniform(k_orig: Sequence[int], budget: int) -> tuple[int, ...]:
    """K_l = min(k_orig[l], c) + e_l,  sum_l K_l = budget.

    c: the highest level whose total fits. e_l: 1 in r of the n layers that still have room, where
    r is what is left of the budget; the i-th of them gets it where floor((i+1)r/n) > floor(ir/n),
    which spreads the remainder evenly over depth.
    """
    check_budget(budget, k_orig)
    levels = range(max(k_orig), 0, -1)
    level = next(c for c in levels if sum(min(k, c) for k in k_orig) <= budget)
    allocation = [min(k, level) for k in k_orig]
    remainder = budget - sum(allocation)
    with_room = [layer for layer, k in enumerate(k_orig) if k > level]
    n = len(with_room)
    for i, layer in enumerate(with_room):
        allocation[layer] += (i + 1) * remainder // n - i * remainder // n
    return tuple(allocation)


def uniform_mean(k_orig: Sequence[int], budget: float) -> tuple[float, ...]:
    """K_l = min(k_orig[l], c),  sum_l K_l = budget, with a real level c.

    For token-level rules, which meet a mean per layer and need no whole number.
    """
    check_budget(budget, k_orig)
    # Layers whose own top-k is below the level are full; the others share what is left.
    level = float(max(k_orig))
    left = budget
    for num_full, k in enumerate(sorted(k_orig)):
        num_open = len(k_orig) - num_full
        if k * num_open >= left:
            level = left / num_open
            break
        left -= k
    return tuple(min(float(k), level) for k in k_orig)
