"""The next-token loss, summed the same way wherever it is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

# Logits handled at a time, in values: what stays in a processor's cache, what fills a GPU.
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
_IGNORED = -100


def logits_of(model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    """`[B, S, V]`, without a cache."""
    logits: torch.Tensor = model(input_ids=ids_BS, use_cache=False).logits
    return logits


def nll_sum(logits_BSV: torch.Tensor, ids_BS: torch.Tensor) -> torch.Tensor:
    """-sum log p(next token), in float64 on the device; S - 1 terms a sequence."""
    # ignoring the last position instead of cutting it off spares a copy of all logits
    targets = F.pad(ids_BS[:, 1:], (0, 1), value=_IGNORED).to(logits_BSV.device)
    total = logits_BSV.new_zeros((), dtype=torch.float64)
    for part, target in chunks(logits_BSV.flatten(0, 1), targets.flatten()):
        losses = F.cross_entropy(part.float(), target, reduction="none", ignore_index=_IGNORED)
        total = total + losses.double().sum()
    return total


def chunks(logits_TV: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The rows of `logits_TV`, and the same rows of `others`, a cacheful at a time."""
    values = _CHUNK.get(logits_TV.device.type, _CHUNK["cuda"])
    rows = max(1, values // logits_TV.shape[1])
    return zip(*(tensor.split(rows) for tensor in (logits_TV, *others)), strict=True)


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
