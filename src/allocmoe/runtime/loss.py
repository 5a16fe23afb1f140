"""The next-token loss, summed the same way wherever it is measured."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

# rows of logits whose float32 copy is made at a time, counted in values
_CHUNK = 1 << 26


def logits_of(model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    """`[B, S, V]`, without a cache."""
    logits: torch.Tensor = model(input_ids=ids_BS, use_cache=False).logits
    return logits


def nll_sum(logits_BSV: torch.Tensor, ids_BS: torch.Tensor) -> torch.Tensor:
    """-sum log p(next token), in float64 on the device; S - 1 terms a sequence."""
    logits = logits_BSV[:, :-1].flatten(0, 1)
    targets = ids_BS[:, 1:].flatten().to(logits.device)
    rows = max(1, _CHUNK // logits.shape[1])
    total = logits.new_zeros((), dtype=torch.float64)
    for part, target in zip(logits.split(rows), targets.split(rows), strict=True):
        losses = F.cross_entropy(part.float(), target, reduction="none")
        total = total + losses.double().sum()
    return total


def num_predictions(ids_NS: torch.Tensor) -> int:
    return ids_NS.shape[0] * (ids_NS.shape[1] - 1)


def overflow_hint(model: Any) -> str:
    """What to try when a loss is not finite."""
    if model.dtype == torch.float32:
        return "the weights themselves may be broken"
    return f"try --dtype float32 instead of {str(model.dtype).removeprefix('torch.')}"


def perplexity(nll: float, predictions: int) -> float:
    """exp(nll / predictions), inf where that is too large for a float."""
    try:
        return math.exp(nll / predictions)
    except OverflowError:
        return math.inf
