"""What differs between vLLM 0.26 and 0.32, in one place."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder


def padding_marks(num_tokens: int) -> torch.Tensor | None:
    """What a CUDA graph pads its batch with: a mask of such rows, or integers below zero in them.

    vLLM keeps its mask up to date only where it uses it itself (VLLM_MOE_SKIP_PADDING, the default
    in newer versions), and older model runners have none. Then the slots in the KV cache tell.
    """
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    marks = context.is_padding if envs.VLLM_MOE_SKIP_PADDING else None
    if marks is None and isinstance(context.slot_mapping, dict):
        marks = next(iter(context.slot_mapping.values()), None)
    return None if marks is None else marks[:num_tokens]


def begin_shared_experts(runner: Any, hidden: torch.Tensor | None) -> None:
    """Shared experts that run before the routed ones, if that is their turn."""
    runner._maybe_apply_shared_experts(hidden, SharedExpertsOrder.NO_OVERLAP)


def end_shared_experts(
    runner: Any, hidden: torch.Tensor | None, given: dict[str, Any]
) -> torch.Tensor | None:
    """Shared experts that run beside the routed ones: what they give, or None without any.

    Newer versions have started them on another stream and say so; older ones start them here.
    """
    if runner._shared_experts is None:
        return None
    if "shared_experts_overlapping" not in given:
        runner._maybe_apply_shared_experts(hidden, SharedExpertsOrder.MULTI_STREAM_OVERLAPPED)
    elif given["shared_experts_overlapping"]:
        runner._shared_experts.wait()
    output: torch.Tensor = runner._shared_experts.output
    return output
