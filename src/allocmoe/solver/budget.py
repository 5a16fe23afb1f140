"""What a user writes as a budget, and whether it can be met."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from allocmoe.errors import AllocMoEError

# Absorbs float noise: 29 / 100 * 100 is 28.999..., and the user meant 29.
SLACK = 1e-9

_FORMS = 'a total ("78"), a share of the original ("50%") or a mean per layer ("3.5/layer")'
_BUDGET = re.compile(
    r"\s*(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?P<unit>%|/\s*layer)?\s*",
    re.IGNORECASE,
)


def parse_budget(text: str | float, k_orig: Sequence[int]) -> int:
    """B = floor(x), floor(x/100 * sum_l k_orig[l]) or floor(x * L).

    B: activations per token over all L MoE layers. x: the number written, read as a total
    (`78`), a share (`50%`) or a mean per layer (`3.5/layer`). k_orig: the model's own top-k of
    each MoE layer. The value before the floor must lie in L..sum(k_orig).
    """
    if isinstance(text, str):
        match = _BUDGET.fullmatch(text)
        if match is None:
            raise AllocMoEError(f"cannot read budget {text!r}: write {_FORMS}")
        value = float(match["number"])
        if match["unit"] == "%":
            value = value / 100 * sum(k_orig)
        elif match["unit"] is not None:
            value *= len(k_orig)
    else:
        value = text
    check_budget(value, k_orig, asked=str(text))
    return math.floor(value + SLACK)


def check_budget(budget: float, k_orig: Sequence[int], asked: str | None = None) -> None:
    """Raise unless L <= budget <= sum(k_orig). `asked`: the user's own words for the budget."""
    if len(k_orig) == 0 or min(k_orig) < 1:
        raise AllocMoEError(f"k_orig needs one top-k of at least 1 per MoE layer: {list(k_orig)}")
    # Written so that NaN fails.
    if len(k_orig) - SLACK <= budget <= sum(k_orig) + SLACK:
        return
    total = f"{budget:.10g}"
    if asked is None or asked.strip() == total:
        wanted = f"budget {total}"
    else:
        wanted = f"budget {asked} ({total} in total)"
    raise AllocMoEError(f"{wanted} is out of range: {_range_text(k_orig)}")


def _range_text(k_orig: Sequence[int]) -> str:
    """The feasible range in all three forms; rounded inwards, so that its ends are feasible."""
    num_layers, most = len(k_orig), sum(k_orig)
    least_percent = math.ceil(10_000 * num_layers / most) / 100
    most_per_layer = math.floor(100 * most / num_layers) / 100
    return (
        f"feasible are {num_layers}..{most} in total, {least_percent:g}%..100%, "
        f"1/layer..{most_per_layer:g}/layer"
    )
