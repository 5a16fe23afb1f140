"""Dynamic-MoE's top-p (arXiv 2403.07652): the smallest set whose cumulative score exceeds p.

keep[t, k] = sum_{j < k} s[t, j] <= p;  the expert that crosses p is included, at most k_orig
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from allocmoe.routing.budget import cut_after
from allocmoe.routing.top_k import drop_padding


def select_dynamic_moe(
    scores_TK: torch.Tensor, p: float, valid_T: torch.Tensor | None = None
) -> torch.Tensor:
    return drop_padding(_mass_before(scores_TK) <= p, valid_T)


def calibrate_dynamic_moe(scores_LNK: Sequence[torch.Tensor], budget: float) -> float:
    """The one p at which the N calibration tokens run `budget` pairs a token over all layers."""
    before = torch.cat([_mass_before(scores)[:, 1:].flatten() for scores in scores_LNK])
    N = scores_LNK[0].shape[0]
    # the first expert of each layer always runs
    count = round((budget - len(scores_LNK)) * N)
    # below 0 not even the first expert would run
    return max(0.0, -cut_after(-before, count))


def _mass_before(scores_TK: torch.Tensor) -> torch.Tensor:
    scores = scores_TK.double()
    return scores.cumsum(dim=1) - scores
