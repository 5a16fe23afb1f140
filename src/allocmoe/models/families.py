"""The model families, as data. A family is named like its folder in `transformers.models`.

Every supported family calls `self.experts(hidden_states, top_k_index, top_k_weights)`. They differ
in how a router turns its logits into a choice and into weights, and only that is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from allocmoe.errors import AllocMoEError


@dataclass(frozen=True)
class Family:
    """How one family's router works.

    score: what a logit becomes before any renormalisation; `given` where the router returns it in
      place of logits, `weights` where only its weights tell.
    renormalise: whether the chosen weights are divided by their sum; `config` asks the router's
      `norm_topk_prob`.
    bias: path of a selection bias from `router` or `block`; it moves the choice, not the weights.
    bias_on: what the bias is added to.
    top_k_settable: whether the router's `top_k` can be lowered layer by layer; where it cannot,
      the surplus experts are masked away.
    """

    name: str
    score: Literal["softmax", "sigmoid", "given", "config"] = "softmax"
    renormalise: Literal["always", "never", "config"] = "config"
    bias: str | None = None
    bias_on: Literal["score", "logit"] = "score"
    top_k_settable: bool = True
    tested: bool = False


def _group(
    names: str,
    score: Literal["softmax", "sigmoid", "given", "config"],
    renormalise: Literal["always", "never", "config"],
    bias: str | None = None,
    bias_on: Literal["score", "logit"] = "score",
    top_k_settable: bool = True,
) -> list[Family]:
    return [
        Family(name, score, renormalise, bias, bias_on, top_k_settable, name not in _UNTESTED)
        for name in names.split()
    ]


# No tiny model of these is in the test suite; every other family goes through all of its checks.
_UNTESTED = frozenset({"deepseek_ocr2", "unlimited_ocr", "qwen3_omni_moe"})

_ROUTER_BIAS = "router.e_score_correction_bias"

FAMILIES: dict[str, Family] = {
    family.name: family
    for group in (
        _group(
            "olmoe flex_olmo qwen2_moe qwen3_moe qwen3_next qwen4_exp mellum qwen3_omni_moe "
            "mistral4",
            "softmax",
            "config",
        ),
        _group(
            "mixtral minimax qwen3_vl_moe qwen3_5_moe hunyuan_v1_moe mistral_large4",
            "softmax",
            "always",
        ),
        _group("jamba deepseek_v2 deepseek_ocr2 unlimited_ocr", "softmax", "never"),
        # top-k of the logits, then a softmax over the chosen: the same as renormalising
        _group(
            "gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared aria",
            "softmax",
            "always",
        ),
        _group(
            "deepseek_v3 deepseek_v32 glm4_moe glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa dots1 "
            "exaone_moe solar_open hy_v4 kimi_linear mimo_v2_flash bailing_hybrid nemotron_h axk1 "
            "axk2 beam",
            "sigmoid",
            "config",
            _ROUTER_BIAS,
        ),
        _group("laguna minimax_m3_vl muse_spark", "sigmoid", "always", _ROUTER_BIAS),
        _group("hy_v3 minimax_m2", "sigmoid", "always", "block.e_score_correction_bias"),
        _group("afmoe", "sigmoid", "always", "block.expert_bias"),
        _group("lfm2_moe", "sigmoid", "config", "block.expert_bias"),
        _group("kolibri1", "sigmoid", "config", _ROUTER_BIAS, "logit"),
        _group("flint", "sigmoid", "config"),
        _group("ernie4_5_moe", "softmax", "always", "router.moe_statics.e_score_correction_bias"),
        # `expert_selection_fn` says which; its softmax is over the chosen
        _group("cohere2_moe", "config", "config"),
        # reads its k from a config that all layers share
        _group("gemma4", "given", "always", top_k_settable=False),
        # sparsemixer always returns two experts. Their weights are no scores: the second one's is
        # its part of what is near to it, which is 1 for almost every token
        _group("phimoe", "softmax", "never", top_k_settable=False),
    )
    for family in group
}

_OWN_CALL = "its experts do not go through the common experts call of transformers"

REFUSED: dict[str, str] = {
    "dbrx": _OWN_CALL,
    "deepseek_v4": "some of its layers choose experts by token id, not by score",
    "diffusion_gemma": "it is a diffusion model, it has no next-token loss to measure",
    "doge": _OWN_CALL,
    "ernie4_5_vl_moe": "it routes text and image tokens through separate groups of experts",
    "inkling": "it normalises routed and shared experts together",
    "jetmoe": _OWN_CALL,
    "llama4": "its router scores every expert densely instead of choosing a top-k set",
    "longcat_flash": _OWN_CALL,
    "nllb_moe": "it is an encoder-decoder with capacity-limited routing",
    "openai_privacy_filter": "it is a token classifier and scales its output by k in two places",
    "step3p7": _OWN_CALL,
    "switch_transformers": "it is an encoder-decoder that runs one expert a token",
    "zaya": "it runs one expert a token, there is nothing to reduce",
}


def family_of(name: str) -> Family:
    """The family, or a refusal that says why."""
    if name in REFUSED:
        raise AllocMoEError(f"the family {name} is not supported: {REFUSED[name]}")
    if name not in FAMILIES:
        raise AllocMoEError(
            f"the family {name} is unknown to this version of allocmoe; "
            "`allocmoe models` lists the families it knows"
        )
    return FAMILIES[name]
