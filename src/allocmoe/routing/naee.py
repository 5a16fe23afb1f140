"""NAEE's expert skipping (arXiv 2402.14800), extended from top-2 to top-k.

keep[t, k] = s[t, k] >= beta_l * s[t, 1];  the first expert always runs
"""

from __future__ import annotations

import torch

from allocmoe.routing.budget import cut_after, num_pairs
from allocmoe.routing.top_k import drop_padding


def select_naee(
    scores_TK: torch.Tensor, beta: float, valid_T: torch.Tensor | None = None
) -> torch.Tensor:
    # in float64, or beta would be rounded onto a ratio
    scores = scores_TK.double()
    keep = scores / scores[:, :1] >= beta
    keep[:, 0] = True
    return drop_padding(keep, valid_T)


def calibrate_naee(scores_NK: torch.Tensor, budget: float) -> float:
    """The beta at which the N calibration tokens run round(K_l * N) pairs."""
    scores = scores_NK.double()
    N = scores.shape[0]
    return cut_after(scores[:, 1:] / scores[:, :1], num_pairs(budget, N) - N)
