"""lm-eval's model class for transformers, with masks. Imported only where lm-eval is installed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import nn


class MaskedHFLM(HFLM):  # type: ignore[misc]
    """HFLM, but the model is told which tokens of a log-likelihood batch are padding.

    HFLM pads such batches on the right with token 0, and passes no mask: nothing that a causal
    model looks back at, but under a token rule padding would compete with tokens, and be counted.
    Batches to generate from come with a mask; they run, and count, until their last answer ends.

    `on_share` hears what share of the requests at hand has just been run.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, batch_size: int) -> None:
        # HFLM may give the tokenizer a padding token
        tokenizer = copy.deepcopy(tokenizer)
        super().__init__(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size
        )
        self.on_share: Callable[[float], None] = lambda share: None
        self._num_inputs = 1
        self._lengths: Iterator[int] = iter(())

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **keys: Any) -> Any:
        # HFLM runs an input once for all continuations of one token, and the longest input first
        inputs = {(*context, *continuation[:-1]) for _, context, continuation in requests}
        lengths = sorted((min(len(ids), self.max_length) for ids in inputs), reverse=True)
        self._num_inputs, self._lengths = len(lengths), iter(lengths)
        return super()._loglikelihood_tokens(requests, *args, **keys)

    def _model_call(self, inps: torch.Tensor, *args: Any, **keys: Any) -> torch.Tensor:
        num_rows, width = inps.shape
        lengths = list(islice(self._lengths, num_rows))
        assert len(lengths) == num_rows
        assert lengths[0] == width
        mask = None
        if lengths[-1] < width:
            ends = torch.tensor(lengths, device=inps.device)[:, None]
            mask = (torch.arange(width, device=inps.device) < ends).long()
            assert torch.equal(inps, inps * mask)
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=inps, attention_mask=mask).logits
        self.on_share(num_rows / self._num_inputs)
        return logits

    def generate_until(self, requests: Any, *args: Any, **keys: Any) -> Any:
        self._num_inputs = len(requests)
        return super().generate_until(requests, *args, **keys)

    def _model_generate(self, context: torch.Tensor, *args: Any, **keys: Any) -> Any:
        out = super()._model_generate(context, *args, **keys)
        self.on_share(len(context) / self._num_inputs)
        return out
