"""The Ascending and Descending baselines: a linear ramp over depth."""

from __future__ import annotations

from collections.abc import Sequence

from allocmoe.errors import AllocMoEError
from allocmoe.solver.budget import check_budget


def ascending(k_orig: Sequence[int], budget: int) -> tuple[int, ...]:
    """K_i = round(K_min + i (K_max - K_min) / (L - 1)), then moved until sum_i K_i = budget.

    i: the layer, 0..L-1. K_min, K_max: the two ends, which stay fixed. Neighbours differ by 0 or
    +1 throughout. Among the inner layers that may move by one towards the budget, each step moves
    the one furthest behind the line in that direction (the shallowest of equals), so that the
    result bends evenly.
    """
    check_budget(budget, k_orig)
    if len(set(k_orig)) > 1:
        raise AllocMoEError(
            f"ascending and descending need the same k_orig in all layers: {list(k_orig)}"
        )
    num_layers = len(k_orig)
    k_min, k_max = _ends(num_layers, k_orig[0], budget)
    rise, span = k_max - k_min, max(num_layers - 1, 1)
    # The ends leave room for steps of one (rise <= span), and a rounded line of slope 0..1 is
    # monotone with steps of at most one: the paper's two passes that enforce this have no work.
    allocation = [k_min + (2 * i * rise + span) // (2 * span) for i in range(num_layers)]

    gap = budget - sum(allocation)
    move = 1 if gap > 0 else -1
    for _ in range(abs(gap)):
        movable = [i for i in range(1, num_layers - 1) if _may_move(allocation, i, move)]
        # Times span, to stay with whole numbers.
        behind = {i: move * (i * rise - span * (allocation[i] - k_min)) for i in movable}
        allocation[max(movable, key=behind.__getitem__)] += move
    return tuple(allocation)


def descending(k_orig: Sequence[int], budget: int) -> tuple[int, ...]:
    """K_i = A_{L-1-i}: the ascending allocation A in reverse order."""
    return ascending(k_orig, budget)[::-1]


def _ends(num_layers: int, k_orig: int, budget: int) -> tuple[int, int]:
    """The first (K_min, K_max) that can meet the budget: K_min from 1 up, K_max from k_orig down.

    With rise r = K_max - K_min <= L - 1 and steps of at most one, the totals run without gaps from
    L K_min + r(r+1)/2 (the rise at the very end) to L K_max - r(r+1)/2 (at the very start).
    """
    for k_min in range(1, k_orig + 1):
        for k_max in range(min(k_orig, k_min + num_layers - 1), k_min - 1, -1):
            rise = k_max - k_min
            corner = rise * (rise + 1) // 2
            if num_layers * k_min + corner <= budget <= num_layers * k_max - corner:
                return k_min, k_max
    # Unreachable: the pairs (k, k) and (k, k+1) alone cover L..L*k_orig.
    raise AssertionError(f"no ramp over {num_layers} layers has the total {budget}")


def _may_move(allocation: Sequence[int], i: int, move: int) -> bool:
    """Whether inner layer i can move by one and still differ from its neighbours by 0 or +1."""
    moved = allocation[i] + move
    return 0 <= moved - allocation[i - 1] <= 1 and 0 <= allocation[i + 1] - moved <= 1
