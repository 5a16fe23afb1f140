"""The sizes of the models, and what each family calls them."""

from __future__ import annotations

import argparse
from typing import Any

from transformers import AutoConfig

# Head width is hidden / heads. `layers` counts DeepSeek-V2's first one, which is dense, too. The
# small ones have k of the public models and their proportions: Qwen1.5-MoE's shared expert is four
# experts wide and DeepSeek-V2-Lite's two.
SMALL = dict(
    layers=10,
    hidden=320,
    heads=5,
    tied=False,
    batch=128,
    learning_rate=2e-3,
    balance_over="layer",
    experts_impl="grouped_mm",
)
NONE = dict(shared_width=0, dense_width=0, latent=0)
SIZES: dict[str, dict[str, Any]] = {
    # the model in src/allocmoe/reference
    "reference": NONE
    | dict(
        family="olmoe",
        layers=8,
        experts=24,
        top_k=6,
        hidden=128,
        heads=4,
        expert_width=48,
        tied=True,
        batch=256,
        learning_rate=4e-3,
        balance_over="model",
        experts_impl="dense",
    ),
    "small-olmoe": SMALL
    | NONE
    | dict(family="olmoe", experts=32, top_k=8, expert_width=128, learning_rate=3e-3),
    "small-qwen2-moe": SMALL
    | NONE
    | dict(family="qwen2_moe", experts=32, top_k=4, expert_width=128, shared_width=512),
    "small-deepseek-v2": SMALL
    | dict(
        family="deepseek_v2",
        layers=11,
        experts=64,
        top_k=6,
        expert_width=64,
        shared_width=128,
        dense_width=1024,
        latent=128,
    ),
}
# what a family needs beyond what all have
NEEDS: dict[str, tuple[str, ...]] = {
    "olmoe": (),
    "qwen2_moe": ("shared_width",),
    "deepseek_v2": ("shared_width", "dense_width", "latent"),
}


def check(args: argparse.Namespace) -> str | None:
    """What is wrong with the sizes, in one line."""
    if args.hidden % args.heads:
        return f"--hidden {args.hidden} is not a multiple of --heads {args.heads}"
    if args.top_k > args.experts:
        return f"--top-k {args.top_k} is more than --experts {args.experts}"
    for name in NEEDS["deepseek_v2"]:
        if bool(getattr(args, name)) != (name in NEEDS[args.family]):
            word = "needs" if name in NEEDS[args.family] else "has no"
            return f"{args.family} {word} --{name.replace('_', '-')}"
    if args.family == "deepseek_v2" and args.shared_width % args.expert_width:
        return (
            "DeepSeek-V2's shared experts are as wide as the others: --shared-width is a multiple"
        )
    return None


def build_config(args: argparse.Namespace, vocabulary: int) -> Any:
    return AutoConfig.for_model(
        args.family,
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=False,
        max_position_embeddings=2 * args.length,
        tie_word_embeddings=args.tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        **SETTINGS[args.family](args),
    )


def olmoe(args: argparse.Namespace) -> dict[str, Any]:
    return dict(
        num_experts=args.experts,
        intermediate_size=args.expert_width,
        router_aux_loss_coef=args.balance,
    )


def qwen2_moe(args: argparse.Namespace) -> dict[str, Any]:
    return dict(
        num_experts=args.experts,
        moe_intermediate_size=args.expert_width,
        shared_expert_intermediate_size=args.shared_width,
        intermediate_size=args.shared_width,  # of dense layers: there are none
        router_aux_loss_coef=args.balance,
    )


def deepseek_v2(args: argparse.Namespace) -> dict[str, Any]:
    width = args.hidden // args.heads
    return dict(
        n_routed_experts=args.experts,
        n_shared_experts=args.shared_width // args.expert_width,
        moe_intermediate_size=args.expert_width,
        first_k_dense_replace=1,
        intermediate_size=args.dense_width,
        q_lora_rank=None,
        kv_lora_rank=args.latent,
        # keys as wide as values, which the quick attention kernels ask for
        qk_nope_head_dim=width - width // 2,
        qk_rope_head_dim=width // 2,
        v_head_dim=width,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    )


SETTINGS = {"olmoe": olmoe, "qwen2_moe": qwen2_moe, "deepseek_v2": deepseek_v2}
FAMILIES = tuple(SETTINGS)
