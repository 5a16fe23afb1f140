"""Alloc-T: inside a layer, activations go to the tokens whose routing is undecided.

    keep each token's first K_base; of all other candidates keep those with the highest score,
    until round(K_l * T) pairs are kept in all

T counts the tokens that are not padding. Ties go to the earlier token, then to the better-ranked
expert. The scopes differ in the pool: all tokens of a forward (`batch`, the paper's), the tokens of
one sequence (`sequence`), or no pool at all but a score fixed at calibration (`threshold`).
"""

from __future__ import annotations

import torch

from allocmoe.routing.budget import base_of, cut_after, num_pairs, num_pairs_device
from allocmoe.routing.top_k import drop_padding, select_top_k


def select_batch(
    scores_TK: torch.Tensor, budget: float, k_base: int = 1, valid_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Alloc-T with one pool for all tokens of the forward."""
    return select_sequence(scores_TK, budget, 1, k_base, valid_T)


def select_sequence(
    scores_TK: torch.Tensor,
    budget: float,
    num_sequences: int,
    k_base: int = 1,
    valid_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Alloc-T with a pool for each of `num_sequences` equally long runs of tokens."""
    T, K = scores_TK.shape
    base = base_of(budget, k_base)
    tokens = T // num_sequences
    # [B, tokens * (K - base)], token-major, so that a stable sort settles ties as promised
    pool = scores_TK[:, base:].reshape(num_sequences, tokens * (K - base))
    if valid_T is None:
        extra: torch.Tensor | int = num_pairs(budget, tokens) - base * tokens
    else:
        padding = ~valid_T.repeat_interleave(K - base).view_as(pool)
        pool = pool.masked_fill(padding, float("-inf"))
        count = valid_T.view(num_sequences, tokens).sum(1, keepdim=True)
        extra = num_pairs_device(budget, count) - base * count
    order = pool.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    keep = torch.ones_like(scores_TK, dtype=torch.bool)
    keep[:, base:] = (rank < extra).view(T, K - base)
    return drop_padding(keep, valid_T)


def select_threshold(
    scores_TK: torch.Tensor,
    budget: float,
    threshold: float,
    k_base: int = 1,
    valid_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keep the first K_base and every other candidate whose score exceeds the threshold."""
    base = base_of(budget, k_base)
    # in float64, or the threshold would be rounded onto a score
    keep = select_top_k(scores_TK, base) | (scores_TK.double() > threshold)
    return drop_padding(keep, valid_T)


def calibrate_threshold(scores_NK: torch.Tensor, budget: float, k_base: int = 1) -> float:
    """The threshold at which the N calibration tokens run round(K_l * N) pairs."""
    base = base_of(budget, k_base)
    N = scores_NK.shape[0]
    return cut_after(scores_NK[:, base:], num_pairs(budget, N) - base * N)
