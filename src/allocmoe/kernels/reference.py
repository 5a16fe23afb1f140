"""The definition of `run_experts`: one pair after the other, as slow as it is plain."""

from __future__ import annotations

from typing import Any

import torch

from allocmoe.kernels.experts import Pairs


def run_experts_reference(
    module: Any, hidden_TH: torch.Tensor, pairs: Pairs, num_tokens: int
) -> torch.Tensor:
    """out[t] = sum over the kept pairs (t, e, w) of w * E_e(x_t)."""
    out = torch.zeros(num_tokens, hidden_TH.shape[1], dtype=torch.float32, device=hidden_TH.device)
    for slot, expert, weight in zip(
        pairs.slot.tolist(), pairs.expert.tolist(), pairs.weight, strict=True
    ):
        token = slot // pairs.num_columns
        x = hidden_TH[token : token + 1]
        up = module.gate_up_proj if module.has_gate else module.up_proj
        up_bias = None
        if module.has_bias:
            up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        y = _linear(x, up, up_bias, expert, module.is_transposed)
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
        down_bias = module.down_proj_bias if module.has_bias else None
        y = _linear(y, module.down_proj, down_bias, expert, module.is_transposed)
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y)
        out[token] += (y * weight)[0].float()
    return out.to(hidden_TH.dtype)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, expert: int, transposed: bool
) -> torch.Tensor:
    y = x @ weight[expert] if transposed else x @ weight[expert].T
    return y if bias is None else y + bias[expert]
