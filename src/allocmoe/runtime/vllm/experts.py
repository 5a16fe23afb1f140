"""Our experts kernel on vLLM's weights, where they lie as the kernel reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from allocmoe.kernels import Layout, Weights
from allocmoe.kernels.layout import Activation
from allocmoe.runtime.blocks import blocks_for

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
_ATTRIBUTE = "_allocmoe_kernel"
# what vLLM calls them -> what the kernel computes
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}


def own_kernel(runner: Any) -> Experts | None:
    """The kernel for a layer, found once; None where vLLM's own experts have to run.

    Quantised weights, other backends' shuffled ones and experts on several devices are left to
    vLLM, and so are shared experts that its own kernel would start.
    """
    if _ATTRIBUTE not in runner.__dict__:
        runner.__dict__[_ATTRIBUTE] = _kernel(runner)
    found: Experts | None = runner.__dict__[_ATTRIBUTE]
    return found


def _kernel(runner: Any) -> Experts | None:
    experts, method = runner.routed_experts, runner._quant_method
    up, down = getattr(experts, "w13_weight", None), getattr(experts, "w2_weight", None)
    if up is None or down is None or not up.is_cuda:
        return None
    parallel = runner.moe_config.moe_parallel_config
    activation = _ACTIVATIONS.get(getattr(experts.activation, "value", ""))
    plain = (
        type(method).__name__ == "UnquantizedFusedMoEMethod"
        and getattr(getattr(method, "unquantized_backend", None), "name", "") == "TRITON"
        and up.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(up.device) >= (8, 0)
        and activation is not None
        and not parallel.use_ep
        and parallel.dp_size == 1  # else vLLM's kernel gathers tokens and sums over ranks
        and not method.mk_can_overlap_shared_experts
        and getattr(experts, "swiglu_limit", None) is None
        and up.dim() == 3
        and up.shape[1] in (down.shape[2], 2 * down.shape[2])
    )
    if not plain:
        return None
    from allocmoe.kernels.fused.launch import launch_experts

    assert activation is not None
    gated = up.shape[1] == 2 * down.shape[2]
    layout = Layout(Activation(activation, gated), interleaved=False, transposed=False)
    weights = Weights(
        up, down, getattr(experts, "w13_bias", None), getattr(experts, "w2_bias", None)
    )
    table = blocks_for(down, layout)
    num_experts = up.shape[0]

    def run(
        hidden: torch.Tensor, ids: torch.Tensor, pair_weights: torch.Tensor, num_pairs: int
    ) -> torch.Tensor:
        blocks = table.choose(num_pairs, num_experts)
        return launch_experts(hidden, ids, pair_weights, weights, layout, blocks)

    return run
