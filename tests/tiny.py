"""Tiny random Mixture-of-Experts language models, one per transformers family, for tests."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import importlib.util
import re
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

# One pool of settings for all families: each config class takes the ones it declares.
COMMON: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=16,  # DENSE in families that size their experts with another key
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    sliding_window=64,
    initializer_range=0.2,  # large enough for hidden 32 that every block matters
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
    attention_dropout=0.0,
    # experts
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    moe_num_experts=8,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    shared_intermediate_size=16,
    n_shared_experts=1,
    num_shared_experts=1,
    moe_num_shared_experts=1,
    first_k_dense_replace=1,
    num_dense_layers=1,
    router_jitter_noise=0.0,
    n_group=4,
    topk_group=3,
    # latent attention
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=64,
    # linear attention
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_head_dim=8,
    linear_num_heads=4,
)
DENSE = 48
K = 4
K_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
MLA = dict(num_key_value_heads=4)
HYBRID = ["linear_attention", "full_attention"] * 2
DENSE_FIRST = dict(mlp_layer_types=["dense", "sparse", "sparse", "sparse"])
MROPE = dict(
    rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[1, 1, 0]
)
VISION = dict(
    depth=1,
    num_hidden_layers=1,
    hidden_size=32,
    out_hidden_size=32,
    intermediate_size=32,
    num_heads=2,
    num_attention_heads=2,
    patch_size=4,
    image_size=16,
)

# family -> (model class, settings of its own)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("OlmoeForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", MLA),
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", MLA),
    "glm4_moe": ("Glm4MoeForCausalLM", {}),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "phimoe": ("PhimoeForCausalLM", dict(num_experts_per_tok=2, router_jitter_noise=0.1)),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {}),
    "minimax": ("MiniMaxForCausalLM", dict(block_size=16)),
    "jamba": (
        "JambaForCausalLM",
        dict(
            expert_layer_period=1,
            expert_layer_offset=0,
            attn_layer_period=2,
            attn_layer_offset=1,
            use_mamba_kernels=False,
            mamba_d_state=8,
        ),
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {}),
    "dots1": ("Dots1ForCausalLM", {}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        dict(layer_types=["conv", "full_attention", "conv", "full_attention"]),
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", {}),
    # further families
    "afmoe": ("AfmoeForCausalLM", {}),
    "aria": ("AriaTextForCausalLM", {}),
    "axk1": ("AXK1ForCausalLM", MLA),
    "axk2": ("AXK2ForCausalLM", MLA),
    "bailing_hybrid": ("BailingHybridForCausalLM", dict(**MLA, layer_types=HYBRID)),
    "beam": ("BeamForCausalLM", DENSE_FIRST),
    "cohere2_moe": ("Cohere2MoeForCausalLM", dict(logit_scale=1.0)),
    "deepseek_v32": ("DeepseekV32ForCausalLM", MLA),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        dict(
            num_key_value_heads=1,
            head_dim=16,
            partial_rotary_factor=0.5,
            o_groups=2,
            o_lora_rank=8,
            mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        ),
    ),
    "exaone_moe": ("ExaoneMoeForCausalLM", {}),
    "flex_olmo": ("FlexOlmoForCausalLM", {}),
    "flint": ("FlintForCausalLM", dict(mlp_only_layers=[0])),
    "gemma4": (
        "Gemma4ForCausalLM",
        dict(
            enable_moe_block=True,
            vocab_size_per_layer_input=128,
            hidden_size_per_layer_input=8,
            global_head_dim=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", MLA),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        dict(vision_config=VISION, rope_parameters=MROPE),
    ),
    "glm5_next": (
        "Glm5NextForConditionalGeneration",
        dict(**MLA, **DENSE_FIRST, vision_config=VISION, qk_rope_head_dim=0, head_dim=0, hc_mult=2),
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", MLA),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", {}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        dict(mamba_n_heads=4, mamba_d_state=8, mamba_chunk_size=16, layer_types=HYBRID),
    ),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", {}),
    "hy_v3": ("HYV3ForCausalLM", {}),
    "hy_v4": ("HYV4ForCausalLM", MLA),
    "inkling": (
        "InklingForCausalLM",
        dict(
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            swa_head_dim=8,
            sliding_window_size=64,
            rel_extent=64,
            logits_mup_width_multiplier=1.0,
        ),
    ),
    "kimi_linear": ("KimiLinearForCausalLM", dict(**MLA, layer_types=HYBRID)),
    "kolibri1": ("Kolibri1ForCausalLM", {}),
    "laguna": ("LagunaForCausalLM", {}),
    "mellum": ("MellumForCausalLM", {}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {}),
    "minimax_m3_vl": ("MiniMaxM3VLForCausalLM", {}),
    "mistral4": ("Mistral4ForCausalLM", MLA),
    "mistral_large4": (
        "MistralLarge4ForConditionalGeneration",
        dict(**MLA, vision_config=dict(VISION, head_dim=16)),
    ),
    "muse_spark": (
        "MuseSparkForConditionalGeneration",
        dict(
            moe_hidden_size=16,
            output_multiplier=1.0,
            vision_config=VISION,
            out_hidden_size=32,
            projector_hidden_size=32,
            audio_config=dict(hidden_sizes=(8, 8, 8, 8), depths=(1, 1, 1, 1), out_hidden_size=32),
        ),
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        dict(
            layers_block_type=["linear_attention", "moe", "full_attention", "moe", "mlp", "moe"],
            moe_shared_expert_intermediate_size=16,
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=16,
            use_mamba_kernels=False,
        ),
    ),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", dict(vision_config=VISION)),
    "qwen4_exp": (
        "Qwen4ExpForCausalLM",
        dict(
            hc_lowrank=8,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=8,
            indexer_budget=64,
            indexer_compress_ratio=4,
        ),
    ),
    "solar_open": ("SolarOpenForCausalLM", {}),
    "zaya": ("ZayaForCausalLM", dict(num_experts_per_tok=1, router_hidden_size=32)),
    # families that route in ways of their own
    "dbrx": (
        "DbrxForCausalLM",
        dict(
            d_model=32,
            n_heads=4,
            n_layers=4,
            max_seq_len=512,
            attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
            ffn_config=dict(ffn_hidden_size=16, moe_num_experts=8, moe_top_k=K),
        ),
    ),
    "doge": ("DogeForCausalLM", dict(is_moe=True, num_experts=16)),
    "jetmoe": ("JetMoeForCausalLM", dict(kv_channels=8)),
    "llama4": ("Llama4ForCausalLM", {}),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        dict(
            **MLA, num_layers=2, ffn_hidden_size=DENSE, expert_ffn_hidden_size=16, zero_expert_num=2
        ),
    ),
    "step3p7": (
        "Step3p7ForConditionalGeneration",
        dict(**DENSE_FIRST, share_expert_dim=16, vision_config=VISION),
    ),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        dict(
            d_model=32,
            d_kv=8,
            d_ff=16,
            num_heads=4,
            num_layers=4,
            num_decoder_layers=4,
            num_sparse_encoder_layers=2,
            num_sparse_decoder_layers=2,
        ),
    ),
}


def available() -> list[str]:
    """The families of FAMILIES that the installed transformers has."""
    # aria's experts joined the common call after 5.17
    missing = {"aria"} if version("transformers") < "5.18" else set()
    return [
        f
        for f in FAMILIES
        if f not in missing and importlib.util.find_spec(f"transformers.models.{f}")
    ]


def k_key(family: str) -> str:
    """The config key of the family's top-k."""
    fields = _fields(_classes(family)[-1])
    for key in K_KEYS:
        if key in fields:
            return key
    raise KeyError(f"{family} has no top-k key in its config")


def tiny(
    family: str, *, top_k: int | None = None, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A tiny random float32 model of the family in eval mode; overrides are config keys."""
    model_class, config_class, text_class = _classes(family)
    own, text_fields = copy.deepcopy(FAMILIES[family][1]), _fields(text_class)
    keys = {key: value for key, value in COMMON.items() if key in text_fields}
    if "moe_intermediate_size" in keys and "intermediate_size" in keys:
        keys["intermediate_size"] = DENSE
    keys |= {key: K for key in K_KEYS if key in text_fields} | own
    if top_k is not None:
        keys[k_key(family)] = top_k
    keys |= overrides
    if config_class is not text_class:
        outer = {k: keys.pop(k) for k in list(keys) if k not in text_fields}
        keys = {"text_config": keys, **outer}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**keys)).float().eval()
        _liven(model)
    return model


_BIAS = re.compile(r"(e_score_correction|expert|proj)_bias$")


@torch.no_grad()
def _liven(model: PreTrainedModel) -> None:
    """Make routing uneven where a fresh model has zeros (or small logits) in its routers."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].normal_(std=0.2)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if name == "tid2eid":  # token id -> experts
                rows = torch.rand(len(tensor), module.num_experts).argsort(-1)
                tensor.copy_(rows[:, : tensor.shape[1]])
            elif name == "scale" and hasattr(module, "per_expert_scale"):  # gemma4
                tensor.fill_(5.0)
            elif not tensor.any() and _BIAS.search(name):
                tensor.normal_(std=0.1)
            elif not tensor.any() and name == "weight" and tensor.ndim == 2:
                tensor.normal_(std=0.2)


def _fields(config_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


@functools.cache
def _classes(family: str) -> tuple[type, type, type]:
    """The family's model class, its config class, and the config class of its language model."""
    if family not in available():
        raise KeyError(f"no family {family!r} in the installed transformers")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    model_class = getattr(module, FAMILIES[family][0])
    config_class = text_class = model_class.config_class
    if "text_config" in _fields(config_class):
        name = config_class.__name__.removesuffix("Config") + "TextConfig"
        text_class = getattr(module, name)
    return model_class, config_class, text_class
