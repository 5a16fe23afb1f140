"""An inference engine of its own, which measures in the place of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from allocmoe.artifacts import LayerActivity, Plan, TokenRule
from allocmoe.models import MoEModel


class Engine(Protocol):
    """What `VllmEngine` does."""

    moe: MoEModel
    dtype: str
    max_length: int

    def follow(self, plan: Plan | None) -> None: ...
    def set_budgets(self, budgets: Sequence[float], token: TokenRule) -> None: ...
    def reset(self) -> None: ...
    def activity(self) -> list[LayerActivity]: ...
    def losses(self, ids_NS: torch.Tensor) -> tuple[float, torch.Tensor]: ...
    def score(
        self, prompts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[tuple[float, bool]]: ...
    def generate(
        self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]]
    ) -> list[str]: ...
