"""Tiny models in a vLLM engine of this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from allocmoe.artifacts import Plan
from tiny import tiny

FAMILIES = ("olmoe", "qwen2_moe", "deepseek_v2")
# those whose tiny models vLLM and transformers agree on
SAME = FAMILIES[:2]
# sizes that vLLM's CPU kernels take
SIZES: dict[str, Any] = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=4)
OWN: dict[str, dict[str, Any]] = {
    "olmoe": dict(intermediate_size=32),
    "qwen2_moe": dict(head_dim=32, moe_intermediate_size=32),
    "deepseek_v2": dict(
        moe_intermediate_size=32, kv_lora_rank=512, qk_rope_head_dim=64, n_group=1, topk_group=1
    ),
}
IDS = torch.randint(3, 128, (3, 21), generator=torch.Generator().manual_seed(0))


def model(family: str) -> Any:
    return tiny(family, **SIZES, **OWN[family])


@dataclass
class Running:
    """The only reference to an engine: the next one must not start before it is gone."""

    llm: Any


@contextmanager
def engine(folder: Path, plan: Plan | None = None, **options: Any) -> Iterator[Running]:
    """An engine in this process."""
    from vllm import LLM

    config = {} if plan is None else {"allocmoe": {"plan": plan.to_json()}}
    given: dict[str, Any] = dict(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        disable_log_stats=True,
        additional_config=config,
    )
    running = Running(LLM(**given | options))
    try:
        yield running
    finally:
        running.llm = None
        gc.collect()


def run(running: Running, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, list[list[int]]]:
    """Log-probabilities of the prompts' tokens, and four greedy tokens."""
    from vllm import SamplingParams

    wanted = SamplingParams(
        max_tokens=4, temperature=0.0, prompt_logprobs=0, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
    outs = running.llm.generate(prompts, wanted, use_tqdm=False)
    logprobs = [
        [
            found[token].logprob
            for token, found in zip(row[1:], out.prompt_logprobs[1:], strict=True)
        ]
        for row, out in zip(ids.tolist(), outs, strict=True)
    ]
    return torch.tensor(logprobs), [list(out.outputs[0].token_ids) for out in outs]
