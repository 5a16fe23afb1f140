"""Whatever can tell the loss of the text under given layer budgets: our walk, or another engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from allocmoe.artifacts import TokenRule
from allocmoe.models import MoEModel
from allocmoe.profiling.ranks import Ranks
from allocmoe.profiling.walk import LayerWalk, can_walk
from allocmoe.runtime.engine import Engine
from allocmoe.runtime.hf import Controller


class WalkMeasurer:
    """A transformers model, run from the middle where its family allows that."""

    def __init__(
        self,
        moe: MoEModel,
        ids_NS: torch.Tensor,
        token: TokenRule,
        batch_size: int,
        ranks: Ranks,
        offload: bool,
    ) -> None:
        self._moe, self._token = moe, token
        self.walkable = can_walk(moe, ids_NS)
        self._walk = LayerWalk(moe, ids_NS, batch_size, ranks=ranks, offload=offload)

    def __enter__(self) -> Self:
        self._controller = Controller(self._moe, self._token, count=False)
        return self

    def __exit__(self, *args: object) -> None:
        self._controller.remove()

    def set_budgets(self, budgets: Sequence[float]) -> None:
        self._controller.set_budgets(budgets)

    def advance(self, decoder_index: int) -> None:
        self._walk.advance(decoder_index)

    def nll(self, move_to: int | None = None) -> float:
        return self._walk.nll(move_to)


class EngineMeasurer:
    """An engine that runs the whole model for every entry."""

    walkable = False

    def __init__(self, engine: Engine, ids_NS: torch.Tensor, token: TokenRule) -> None:
        self._engine, self._ids_NS, self._token = engine, ids_NS, token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._engine.set_budgets(self._engine.moe.k_orig, TokenRule())

    def set_budgets(self, budgets: Sequence[float]) -> None:
        self._engine.set_budgets(budgets, self._token)

    def advance(self, decoder_index: int) -> None:
        raise AssertionError("an engine does not walk")

    def nll(self, move_to: int | None = None) -> float:
        return self._engine.losses(self._ids_NS)[0]


Measurer = WalkMeasurer | EngineMeasurer
