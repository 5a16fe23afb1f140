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
    device: torch.device
    blocks: BlockTable

    def takes(self, module: Any, hidden_TH: torch.Tensor, weights_TK: torch.Tensor) -> bool:
        """It has no backward pass, one dtype and one device."""
        if hidden_TH.dtype != self.dtype or hidden_TH.device != self.device:
            return False
        if not torch.is_grad_enabled():
            return True
        weights = weights_of(module)
        parts = (
            hidden_TH, weights_TK, weights.up, weights.down, weights.up_bias, weights.down_bias,
        )  # fmt: skip
        return not any(part is not None and part.requires_grad for part in parts)

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


def find_kernel(module: Any) -> Kernel | None:
    """The kernel for an experts module, the one it has if that still fits; None if there is none.

    It is used once it is in the module's `__dict__`, as `KERNEL`.
    """
    weight = module.down_proj
    own: Kernel | None = module.__dict__.get(KERNEL)
    if own is not None and (own.dtype, own.device) == (weight.dtype, weight.device):
        return own
    fits = weight.dtype in (torch.bfloat16, torch.float16) and _device_runs_it(weight.device)
    layout = read_layout(module) if fits else None
    if layout is None:
        return None
    return Kernel(layout, weight.dtype, weight.device, blocks_for(weight, layout))


def _device_runs_it(device: torch.device) -> bool:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
