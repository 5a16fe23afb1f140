"""The routed experts in plain torch, for any device: dropped pairs cost no gather and no product.

Shape legend: T tokens, K columns of the routing, N kept pairs, H hidden size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Pairs:
    """The N kept pairs, sorted by expert. `slot` is the pair's place in the flat `[T, K]`."""

    slot: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor
    num_columns: int


def compact(
    index_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    keep_TK: torch.Tensor,
    num_kept: int | None = None,
) -> Pairs:
    """The kept pairs, sorted by expert; within an expert by token.

    With `num_kept` known beforehand nothing is brought to the host; without it the count has to be.
    """
    keep = keep_TK.flatten()
    if num_kept is None:
        slot = keep.nonzero().squeeze(1)
    else:
        slot = (~keep).to(torch.uint8).argsort(stable=True)[:num_kept]
    expert, order = index_TK.flatten()[slot].sort(stable=True)
    slot = slot[order]
    return Pairs(slot, expert, weights_TK.flatten()[slot], index_TK.shape[1])


def run_experts(
    module: Any, hidden_TH: torch.Tensor, pairs: Pairs, num_tokens: int
) -> torch.Tensor:
    """out[t] = sum over the kept pairs (t, e, w) of w * E_e(x_t).

    `module` is an experts module of transformers (`use_experts_implementation`). The sum is taken
    in the order of a token's columns, in float32, so the same input gives the same bits.
    """
    x = hidden_TH[pairs.slot // pairs.num_columns]
    # where each expert's rows end; bincount would make the host wait
    experts = torch.arange(module.num_experts, device=pairs.expert.device)
    offsets = torch.searchsorted(pairs.expert, experts, right=True, out_int32=True)

    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    y = _grouped_linear(module, up_name, x, offsets, pairs.expert)
    y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
    y = _grouped_linear(module, "down_proj", y, offsets, pairs.expert)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    y = y * pairs.weight[:, None]

    # scattering to distinct slots and summing is deterministic on CUDA, index_add_ is not
    slots = y.new_zeros(num_tokens * pairs.num_columns, y.shape[1])
    slots[pairs.slot] = y
    out = slots.view(num_tokens, pairs.num_columns, y.shape[1]).sum(1, dtype=torch.float32)
    return out.to(hidden_TH.dtype)


def _grouped_linear(
    module: Any, name: str, x: torch.Tensor, offsets: torch.Tensor, expert: torch.Tensor
) -> torch.Tensor:
    """Rows of `x` sorted by expert, each times the weight of its expert."""
    weight = getattr(module, name)
    if not module.is_transposed:
        weight = weight.transpose(-2, -1)
    x = x.to(weight.dtype)
    if _has_grouped_mm(x, weight):
        y = F.grouped_mm(x, weight, offs=offsets)
    else:
        ends = offsets.tolist()
        runs = [(e, a, b) for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if a < b]
        y = torch.cat([x[a:b] @ weight[e] for e, a, b in runs] or [x @ weight[0]])
    if module.has_bias:
        y = y + getattr(module, f"{name}_bias")[expert]
    return y


def _has_grouped_mm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """On CPU a loop over the experts is quicker; on CUDA grouped_mm wants rows of 16 bytes."""
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    row = 16 // x.element_size()
    return weight.shape[1] % row == 0 and weight.shape[2] % row == 0
