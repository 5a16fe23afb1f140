"""The kernels as operators of torch, so that torch.compile takes them as they are."""

from __future__ import annotations

import torch

from allocmoe.kernels.blocks import Blocks
from allocmoe.kernels.fused.launch import launch_experts, launch_select
from allocmoe.kernels.layout import Activation, Layout, Weights


@torch.library.custom_op("allocmoe::experts", mutates_args=())
def experts_op(
    hidden_TH: torch.Tensor,
    index_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    function: str,
    gated: bool,
    limit: float,
    alpha: float,
    shift: float,
    interleaved: bool,
    transposed: bool,
    blocks: list[int],
) -> torch.Tensor:
    layout = Layout(Activation(function, gated, limit, alpha, shift), interleaved, transposed)
    weights = Weights(up, down, up_bias, down_bias)
    return launch_experts(
        hidden_TH, index_TK, weights_TK, weights, layout, Blocks.from_numbers(blocks)
    )


@experts_op.register_fake
def _(hidden_TH: torch.Tensor, *args: object) -> torch.Tensor:
    return torch.empty_like(hidden_TH)


def fused_experts(
    hidden_TH: torch.Tensor,
    index_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    weights: Weights,
    layout: Layout,
    blocks: Blocks,
) -> torch.Tensor:
    """`launch_experts`, as an operator where torch is compiling."""
    if not torch.compiler.is_compiling():
        return launch_experts(hidden_TH, index_TK, weights_TK, weights, layout, blocks)
    f = layout.activation
    out: torch.Tensor = experts_op(
        hidden_TH, index_TK, weights_TK, weights.up, weights.down, weights.up_bias,
        weights.down_bias, f.function, f.gated, f.limit, f.alpha, f.shift, layout.interleaved,
        layout.transposed, blocks.numbers(),
    )  # fmt: skip
    return out


@torch.library.custom_op("allocmoe::select", mutates_args=())
def select_op(
    index_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    valid_T: torch.Tensor | None,
    params: torch.Tensor,
    num_experts: int,
    rule: str,
    score: str,
    bias_on: str,
    base: int,
    num_pools: int,
    renormalise: bool,
    renormalise_over: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`launch_select`, which says what it takes."""
    return launch_select(
        index_TK, weights_TK, logits_TE, bias_E, valid_T, params, num_experts=num_experts,
        rule=rule, score=score, bias_on=bias_on, base=base, num_pools=num_pools,
        renormalise=renormalise, renormalise_over=renormalise_over,
    )  # fmt: skip


@select_op.register_fake
def _(
    index_TK: torch.Tensor, weights_TK: torch.Tensor, *args: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(index_TK, dtype=torch.int32), torch.empty_like(weights_TK)
