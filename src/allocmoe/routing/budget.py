"""How many pairs a layer budget allows, on the host and on the device alike."""

from __future__ import annotations

import math

import torch


def num_pairs(budget: float, num_tokens: int) -> int:
    """round(K_l * T), halves to even: the pairs that a layer with budget K_l runs for T tokens."""
    return round(budget * num_tokens)


def num_pairs_device(budget: float, num_tokens: torch.Tensor) -> torch.Tensor:
    """`num_pairs` of a count that lives on the device, without bringing it to the host.

    float64 makes the product, and so the rounding, the same as Python's.
    """
    return (num_tokens.double() * budget).round().long()


def base_of(budget: float, k_base: int) -> int:
    """The experts every token keeps: K_base, but never more than the layer can pay for."""
    return min(k_base, math.floor(budget))


def cut_after(values: torch.Tensor, count: int) -> float:
    """A number that exactly the `count` largest of `values` exceed (more or fewer at a tie).

    The middle between two neighbours is taken, so that rounding on another device does not move a
    value across; beyond the ends it is one away from the extreme.
    """
    if values.numel() == 0:
        return 0.0
    ordered = values.flatten().double().sort(descending=True).values
    above = ordered[count - 1] if count > 0 else ordered[0] + 2
    below = ordered[count] if count < ordered.numel() else ordered[-1] - 2
    return float((above + below) / 2)
