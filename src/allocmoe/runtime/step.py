"""What one forward of the decoder looks like: how many sequences, and which tokens are padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from allocmoe.errors import AllocMoEError


@dataclass(frozen=True)
class Step:
    """`valid_T` marks the tokens that are not padding; None if no mask was given at all."""

    num_sequences: int = 1
    valid_T: torch.Tensor | None = None

    def valid_on(self, device: torch.device) -> torch.Tensor | None:
        # with device_map the layers may live on other devices than the mask
        return None if self.valid_T is None else self.valid_T.to(device)

    def count(self, num_tokens: int, device: torch.device) -> torch.Tensor | int:
        """The tokens that are not padding; a count of a mask stays on the device."""
        valid = self.valid_on(device)
        return num_tokens if valid is None else valid.sum()

    @cached_property
    def num_valid(self) -> int | None:
        """The same on the host, which waits for it once a step; None where there is no mask."""
        return None if self.valid_T is None else int(self.valid_T.sum())


@dataclass
class CurrentStep:
    """The step that the layers are in, shared by all of them."""

    step: Step = Step()


def read_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """The step from the arguments of the decoder's forward."""
    tokens = kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if tokens is None and args:
        tokens = args[0]
    if tokens is None:
        raise AllocMoEError("the model was called without input_ids and without inputs_embeds")
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    valid = _valid_tokens(mask, kwargs.get("past_key_values"), tokens.shape[1])
    if valid is None:
        return Step(tokens.shape[0])
    return Step(tokens.shape[0], valid.expand(tokens.shape[0], -1).reshape(-1))


def _valid_tokens(mask: Any, cache: Any, length: int) -> torch.Tensor | None:
    """`[B, length]`, True where a token of this forward is not padding.

    A 2D mask ends with the columns of this forward. A 4D mask (`generate` with a static cache
    builds it beforehand, one for each kind of attention) allows queries to see keys: a padding
    token is a key that no query may see, and its column is where the cache will write it.
    """
    if isinstance(mask, dict):
        masks = [mask.get("full_attention"), *mask.values()]
        mask = next((m for m in masks if m is not None), None)
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise AllocMoEError(
            f"padding cannot be read from an attention mask of type {type(mask).__name__}; "
            'load the model with attn_implementation="sdpa"'
        )
    if mask.dim() == 2:
        return mask[:, -length:].bool()
    # a float mask adds 0 where attention is allowed and a huge negative number where it is not
    allowed = mask if mask.dtype == torch.bool else mask >= 0
    seen = allowed.any(dim=1).any(dim=1)
    past = torch.as_tensor(0 if cache is None else cache.get_seq_length(), device=mask.device)
    # a sliding window that is full keeps the newest columns, this forward's last
    start = past.clamp(max=seen.shape[1] - length)
    return seen[:, torch.arange(length, device=mask.device) + start]
