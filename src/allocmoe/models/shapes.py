"""Public models by their shape alone: the same layers and sizes, with random weights.

What a model costs to run hangs on its shape. What it says does not come along, and neither does its
routing: random weights spread tokens over the experts more evenly than training does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from allocmoe.errors import AllocMoEError
from allocmoe.models.load import to_device, to_dtype

# name -> (family, the settings of its public config that shape it)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # deepseek-ai/DeepSeek-V2-Lite
    "deepseek-v2-lite": (
        "deepseek_v2",
        dict(
            vocab_size=102400,
            hidden_size=2048,
            num_hidden_layers=27,
            first_k_dense_replace=1,
            intermediate_size=10944,
            num_attention_heads=16,
            num_key_value_heads=16,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            norm_topk_prob=False,
        ),
    ),
    # Qwen/Qwen1.5-MoE-A2.7B
    "qwen1.5-moe": (
        "qwen2_moe",
        dict(
            vocab_size=151936,
            hidden_size=2048,
            num_hidden_layers=24,
            intermediate_size=5632,
            num_attention_heads=16,
            num_key_value_heads=16,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            norm_topk_prob=False,
        ),
    ),
    # allenai/OLMoE-1B-7B-0924
    "olmoe": (
        "olmoe",
        dict(
            vocab_size=50304,
            hidden_size=2048,
            num_hidden_layers=16,
            intermediate_size=1024,
            num_attention_heads=16,
            num_key_value_heads=16,
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=False,
        ),
    ),
    # Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b": (
        "qwen3_moe",
        dict(
            vocab_size=151936,
            hidden_size=2048,
            num_hidden_layers=48,
            intermediate_size=6144,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    # openai/gpt-oss-20b, with its experts unpacked
    "gpt-oss-20b": (
        "gpt_oss",
        dict(
            vocab_size=201088,
            hidden_size=2880,
            num_hidden_layers=24,
            intermediate_size=2880,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
        ),
    ),
    # mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x7b": (
        "mixtral",
        dict(
            vocab_size=32000,
            hidden_size=4096,
            num_hidden_layers=32,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
    ),
}


def build_shape(
    name: str,
    *,
    layers: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    seed: int = 0,
) -> nn.Module:
    """A model of the shape, made on the device itself; `layers` keeps the first ones only.

    device: `meta` makes it without weights. dtype: `auto` is bfloat16, as these are published.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if name not in SHAPES:
        raise AllocMoEError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    family, settings = SHAPES[name]
    most, dense = settings["num_hidden_layers"], settings.get("first_k_dense_replace", 0)
    if layers is not None and not dense < layers <= most:
        raise AllocMoEError(f"{name} takes {dense + 1} to {most} layers, not {layers}")
    place = torch.device("meta") if device == "meta" else to_device(device)
    if place is None:
        raise AllocMoEError("a shape is built on one device: take auto, cpu, cuda or cuda:N")
    wanted = torch.bfloat16 if dtype == "auto" else to_dtype(dtype)
    config: Any = AutoConfig.for_model(family, **settings | {"num_hidden_layers": layers or most})
    build: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), place:
        torch.manual_seed(seed)
        model: nn.Module = build(config, dtype=wanted)
    label = name if layers in (None, most) else f"{name}, {layers} layers"
    model.config._name_or_path = label  # type: ignore[union-attr]
    return model.eval()
