"""The fused kernel for the experts modules of a model: which of them take it, with which blocks."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from allocmoe.kernels import Layout, read_layout, weights_of
from allocmoe.kernels.blocks import BlockTable
from allocmoe.runtime.blocks import blocks_for

# where a module of the model keeps its kernel
KERNEL = "_allocmoe_kernel"


@dataclass(frozen=True)
class Kernel:
    """The fused kernel of one experts module."""

    layout: Layout
    dtype: torch.dtype
    blocks: BlockTable

    def takes(self, module: Any, hidden_TH: torch.Tensor) -> bool:
        """It has no backward pass, and one dtype."""
        trains = torch.is_grad_enabled() and (
            hidden_TH.requires_grad or module.down_proj.requires_grad
        )
        return hidden_TH.dtype == self.dtype and not trains

    def run(
        self,
        module: Any,
        hidden_TH: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        num_pairs: int | None = None,
    ) -> torch.Tensor:
        """Runs the pairs whose expert id is in range; `num_pairs` is about how many those are."""
        from allocmoe.kernels.fused.ops import fused_experts

        T, K = index_TK.shape
        blocks = self.blocks.choose(num_pairs or T * K, module.num_experts)
        return fused_experts(
            hidden_TH, index_TK, weights_TK, weights_of(module), self.layout, blocks
        )


def attach_kernel(module: Any) -> bool:
    """Give an experts module its kernel, if it can have one. False if it cannot."""
    if KERNEL not in module.__dict__:
        weight = module.down_proj
        fits = weight.dtype in (torch.bfloat16, torch.float16) and _device_runs_it(weight.device)
        layout = read_layout(module) if fits else None
        if layout is None:
            return False
        module.__dict__[KERNEL] = Kernel(layout, weight.dtype, blocks_for(weight, layout))
    return True


def _device_runs_it(device: torch.device) -> bool:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
