"""Plain top-k as a mask, for models whose own k cannot be changed layer by layer."""

from __future__ import annotations

import torch


def select_top_k(
    scores_TK: torch.Tensor, k: int, valid_T: torch.Tensor | None = None
) -> torch.Tensor:
    """keep[t, j] = j < k."""
    keep = torch.arange(scores_TK.shape[1], device=scores_TK.device) < k
    return drop_padding(keep.expand(scores_TK.shape), valid_T)


def drop_padding(keep_TK: torch.Tensor, valid_T: torch.Tensor | None) -> torch.Tensor:
    return keep_TK if valid_T is None else keep_TK & valid_T[:, None]
