"""The weights of the kept experts."""

from __future__ import annotations

import torch


def reweigh(
    weights_TK: torch.Tensor,
    scores_TK: torch.Tensor,
    keep_TK: torch.Tensor,
    renormalise_over: int | None = None,
) -> torch.Tensor:
    """w'[t, k] = w[t, k] * mass(all K) / mass(reference set), for models that renormalise.

    Such a model gives w = scale * s / sum_K s, whatever its scale. The reference set is the kept
    experts, or the first `renormalise_over` (k2) of them all. Multiplying by a ratio of masses
    needs to know nothing else about the family.
    """
    scores = scores_TK.float()
    if renormalise_over is None:
        reference = (scores * keep_TK).sum(1, keepdim=True)
    else:
        reference = scores[:, :renormalise_over].sum(1, keepdim=True)
    # a token that keeps nothing (padding) has no mass and needs no weight
    ratio = scores.sum(1, keepdim=True) / reference.clamp_min(torch.finfo(torch.float32).tiny)
    return (weights_TK.float() * ratio).to(weights_TK.dtype)
