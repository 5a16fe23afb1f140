"""How attention and experts are computed in training, and the loss that keeps the load even."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface


def causal_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """No mask: transformers makes one when compiled, and then the quick kernels do not apply."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def dense_experts(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Every expert for every token, then the routing weights: zero for those not chosen."""
    E, twice, H = module.gate_up_proj.shape
    full = torch.zeros(hidden.shape[0], E, dtype=weights.dtype, device=weights.device)
    full = full.scatter(1, index, weights)
    up = F.linear(hidden, module.gate_up_proj.reshape(E * twice, H)).view(-1, E, twice)
    gate, value = up.chunk(2, dim=-1)
    mixed = module.act_fn(gate) * value * full[..., None].to(up.dtype)
    down = module.down_proj.permute(0, 2, 1).reshape(E * (twice // 2), H)
    return mixed.flatten(1) @ down.to(mixed.dtype)


def spread(tokens_TH: torch.Tensor, order_S: torch.Tensor, k: int) -> torch.Tensor:
    """A row for each chosen expert of each token (S = T k), in the given order."""
    return tokens_TH[order_S // k]


def collect(rows_SH: torch.Tensor, place_S: torch.Tensor, k: int) -> torch.Tensor:
    """The sum of each token's rows; `place` is the inverse of the order they are in."""
    return rows_SH[place_S].view(-1, k, rows_SH.shape[1]).sum(1)


class Spread(torch.autograd.Function):
    """`spread`, whose gradient is `collect`: autograd itself would add row by row into zeros."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, order: Any, place: Any, k: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return spread(tokens, order, k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return collect(grad, ctx.saved_tensors[0], ctx.k), None, None, None


class Collect(torch.autograd.Function):
    """`collect`, whose gradient is `spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Any, order: Any, place: Any, k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return collect(rows, place, k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return spread(grad, ctx.saved_tensors[0], ctx.k), None, None, None


def grouped_experts(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Only the chosen experts: rows sorted by expert, then one grouped product for each matrix."""
    E, k = module.gate_up_proj.shape[0], index.shape[1]
    # autocast does not reach grouped_mm
    dtype = torch.bfloat16 if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
    expert, order = torch.sort(index.flatten().to(torch.int32))
    place = torch.empty_like(order)
    place = place.scatter(0, order, torch.arange(order.numel(), device=order.device))
    bounds = torch.arange(E, dtype=torch.int32, device=expert.device)
    ends = torch.searchsorted(expert, bounds, right=True, out_int32=True)

    rows = Spread.apply(hidden.to(dtype), order, place, k)
    up = F.grouped_mm(rows, module.gate_up_proj.to(dtype).transpose(1, 2), offs=ends)
    gate, value = up.chunk(2, dim=-1)
    # weights before the last product instead of after: the same sum, over narrower rows
    weight = Spread.apply(weights.reshape(-1, 1), order, place, 1)
    mixed = module.act_fn(gate) * value * weight.to(dtype)
    down = F.grouped_mm(mixed, module.down_proj.to(dtype).transpose(1, 2), offs=ends)
    return Collect.apply(down, order, place, k)


EXPERTS = {"dense": dense_experts, "grouped_mm": grouped_experts}


def set_layers(model: Any, experts: str) -> None:
    # names of our own: transformers has a grouped_mm too, which autocast does not suit
    AttentionInterface.register("recipe", causal_attention)
    ExpertsInterface.register(f"recipe_{experts}", EXPERTS[experts])
    model.set_attn_implementation("recipe")
    model.set_experts_implementation(f"recipe_{experts}")


def reset_layers(model: Any) -> None:
    """As anyone else would load it."""
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("grouped_mm")


class Routers:
    """Reads the load of every router by hooks: not every family returns its router logits."""

    def __init__(self, model: nn.Module) -> None:
        blocks = [m for m in model.modules() if hasattr(m, "gate") and hasattr(m, "experts")]
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.handles = [block.gate.register_forward_hook(self.look) for block in blocks]

    def look(self, router: nn.Module, args: Any, output: Any) -> None:
        logits, _, index = output
        scores = logits.float().softmax(-1)
        chosen = torch.zeros_like(scores).scatter(1, index, 1.0)
        self.seen.append((chosen.mean(0), scores.mean(0)))

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Since the last call: how often each expert was chosen, and its mean score, [L, E]."""
        chosen, scores = zip(*self.seen, strict=True)
        self.seen.clear()
        return torch.stack(chosen), torch.stack(scores)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def balance_loss(chosen_LE: torch.Tensor, scores_LE: torch.Tensor, over: str) -> torch.Tensor:
    """E sum_e f_e p_e: f_e how often expert e is chosen, p_e its mean score; k if all are even.

    over: `layer` is the mean of that over the layers. `model` has f and p averaged over the layers
    first, as transformers does, which also accepts layers that are uneven in opposite ways.
    """
    if over == "model":
        chosen_LE, scores_LE = chosen_LE.mean(0, keepdim=True), scores_LE.mean(0, keepdim=True)
    return chosen_LE.shape[1] * (chosen_LE * scores_LE).sum(-1).mean()
