"""A vLLM engine to measure with: budgets change while it runs, losses come from prompt logprobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from allocmoe.artifacts import LayerActivity, Plan, TokenRule
from allocmoe.codec import decode
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoEModel, inspect_model
from allocmoe.models.load import load_skeleton, place
from allocmoe.runtime.vllm.served import KEY, check_layers
from allocmoe.runtime.vllm.worker import EXTENSION


class VllmEngine:
    """A model in vLLM, unmodified until it is told to `follow` a plan.

    `options` go to vLLM as they are (`tensor_parallel_size`, `distributed_executor_backend`, ...).
    """

    def __init__(
        self,
        name: str,
        *,
        max_length: int,
        dtype: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        tokenizes: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """max_length: of a prompt and what follows it. tokenizes: for `generate`, which stops at
        strings."""
        try:
            from vllm import LLM
        except ImportError as error:
            raise AllocMoEError(
                "the engine vllm needs vLLM 0.26 or newer: pip install vllm"
            ) from error
        skeleton = load_skeleton(name, revision=revision, trust_remote_code=trust_remote_code)
        self.moe: MoEModel = inspect_model(skeleton)
        self.dtype = dtype
        self.max_length = max_length
        self._unmodified = _plan(self.moe, self.moe.k_orig, TokenRule())
        given: dict[str, Any] = dict(
            model=place(name),
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            skip_tokenizer_init=not tokenizes,
            # plans change while the engine runs, which graphs and compiled code would not see
            enforce_eager=True,
            enable_prefix_caching=False,
            # one token more than the prompt, which vLLM always generates
            max_model_len=max_length + 1,
            worker_extension_cls=EXTENSION,
        )
        config = {KEY: {"plan": self._unmodified.to_json(), "count": True}}
        extra = dict(options or {})
        config |= extra.pop("additional_config", {})
        try:
            self._llm = LLM(**given | extra, additional_config=config)
        except ValueError as error:
            if "max_model_len" not in str(error):
                raise
            raise AllocMoEError(
                f"{max_length} tokens and one more, which vLLM adds, are too many for {name}: "
                "use shorter sequences"
            ) from error
        # fails here, not after hours, where a layer does not follow
        self.follow(None)
        self.activity()
        self.reset()

    def follow(self, plan: Plan | None) -> None:
        """Run `plan` from here on, or the unmodified model."""
        self._llm.collective_rpc("allocmoe_follow", args=((plan or self._unmodified).to_json(),))

    def set_budgets(self, budgets: Any, token: TokenRule) -> None:
        self.follow(_plan(self.moe, budgets, token))

    def reset(self) -> None:
        self._llm.collective_rpc("allocmoe_reset")

    def activity(self) -> list[LayerActivity]:
        """What ran in each MoE layer since the start or the last `reset`."""
        layers: dict[int, LayerActivity] = {}
        workers = self._llm.collective_rpc("allocmoe_status")
        for worker in workers:
            for index, data in worker["layers"].items():
                layers[int(index)] = decode(LayerActivity, data, "a worker's answer")
        check_layers(workers[0]["plan"], layers)
        return [layers[index] for index in sorted(layers)]

    def losses(self, ids_NS: torch.Tensor) -> tuple[float, torch.Tensor]:
        """-sum log p(next token) over all sequences, and the likeliest token at every position
        that has a next one, `[N, S - 1]`."""
        told = self._predictions(ids_NS.tolist())
        total = -math.fsum(logprob for row in told for logprob, _ in row)
        return total, torch.tensor([[likeliest for _, likeliest in row] for row in told])

    def score(
        self, prompts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[tuple[float, bool]]:
        """For each prompt the log-likelihood of its tokens from `start` on, and whether every one
        of them is the likeliest."""
        scores = []
        for ids, start, told in zip(prompts, starts, self._predictions(prompts), strict=True):
            own = told[start - 1 :]
            same = all(likeliest == ids[start + i] for i, (_, likeliest) in enumerate(own))
            scores.append((math.fsum(logprob for logprob, _ in own), same))
        return scores

    def _predictions(self, prompts: Sequence[Sequence[int]]) -> list[list[tuple[float, int]]]:
        """Of every token but the first its log-probability, and the token that was likeliest."""
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
        given = [{"prompt_token_ids": list(ids)} for ids in prompts]
        return [
            [
                (found[token].logprob, next(t for t, e in found.items() if e.rank == 1))
                for token, found in zip(ids[1:], out.prompt_logprobs[1:], strict=True)
            ]
            for ids, out in zip(
                prompts, self._llm.generate(given, wanted, use_tqdm=False), strict=True
            )
        ]

    def generate(
        self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]]
    ) -> list[str]:
        """What follows each prompt, by options of vLLM's sampling; without its stop string."""
        from vllm import SamplingParams

        given = [{"prompt_token_ids": list(ids)} for ids in prompts]
        wanted = [SamplingParams(**own) for own in options]
        outs = self._llm.generate(given, wanted, use_tqdm=False)
        return [str(out.outputs[0].text) for out in outs]

    def close(self) -> None:
        """End the engine's processes."""
        del self._llm


def _plan(moe: MoEModel, budgets: Any, token: TokenRule) -> Plan:
    total = float(sum(budgets))
    return Plan(
        model=moe.info,
        text=None,
        method="uniform",
        layer_budgets=tuple(float(k) for k in budgets),
        token=token,
        budget_asked=f"{total:g}",
        budget=math.ceil(total),
        budget_used=total,
        predicted_loss=None,
        normalisation=None,
        context=None,
    )
