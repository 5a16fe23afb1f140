"""Thresholds for the token rules that have them, from a text.

Dropping experts in one layer moves the scores of the next. Layer thresholds are therefore set one
after the other, each on the scores that the layers before it, already thinned out, really produce:
on the calibration text the layer budgets are then met exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from allocmoe.artifacts import Rule, Scope, TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoEModel
from allocmoe.profiling.walk import LayerWalk, can_walk
from allocmoe.progress import Bar, Progress
from allocmoe.routing import calibrate_dynamic_moe, calibrate_naee, calibrate_threshold
from allocmoe.runtime.control import Observed
from allocmoe.runtime.hf import Controller
from allocmoe.runtime.loss import overflow_hint
from allocmoe.text import Text, check_ids

# Dynamic-MoE's p moves the scores it was set on; it settles within a few rounds.
_MAX_ROUNDS = 8
_TOLERANCE = 1e-3


def calibrate(
    moe: MoEModel,
    text: Text,
    layer_budgets: Sequence[float],
    *,
    rule: Rule,
    scope: Scope | None = None,
    k_base: int = 1,
    renormalise_over: int | None = None,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> TokenRule:
    """The rule with the thresholds that meet `layer_budgets` on `text`."""
    if batch_size < 1:
        raise AllocMoEError(f"batch_size must be 1 or more, not {batch_size}")
    draft = TokenRule(rule, scope, k_base, (0.0,) * len(moe.layers), renormalise_over)
    check_ids(moe.model, text.ids)
    scores = _Scores(moe)
    walkable = can_walk(moe, text.ids)
    with (
        Controller(moe, draft, observe=scores.add) as controller,
        (progress or Progress()).bar(f"calibrate {draft.label}", len(moe.layers)) as bar,
    ):
        walk = LayerWalk(moe, text.ids, batch_size)
        if rule == "dynamic-moe":
            thresholds = _one_for_all(walk, controller, scores, layer_budgets, bar)
        else:
            thresholds = _layer_by_layer(walk, walkable, controller, scores, layer_budgets, bar)
    return replace(draft, thresholds=thresholds)


class _Scores:
    """Collects the routing scores of each layer on the host."""

    def __init__(self, moe: MoEModel) -> None:
        self._model = moe.model
        self._parts: list[list[torch.Tensor]] = [[] for _ in moe.layers]

    def add(self, seen: Observed) -> None:
        scores = seen.scores_TK if seen.valid_T is None else seen.scores_TK[seen.valid_T]
        scores = scores.to("cpu", copy=True)
        if scores.isnan().any():
            raise AllocMoEError(
                f"routing scores of MoE layer {seen.layer} are nan: {overflow_hint(self._model)}"
            )
        self._parts[seen.layer].append(scores)

    def take(self) -> list[torch.Tensor]:
        """`[N, K]` of each layer seen since the last time; empty where a layer did not run."""
        taken = [torch.cat(parts) if parts else torch.empty(0, 0) for parts in self._parts]
        self._parts = [[] for _ in self._parts]
        return taken


def _layer_by_layer(
    walk: LayerWalk,
    walkable: bool,
    controller: Controller,
    scores: _Scores,
    layer_budgets: Sequence[float],
    bar: Bar,
) -> tuple[float, ...]:
    thresholds = []
    for control, budget in zip(controller.controls, layer_budgets, strict=True):
        layer, token = control.layer, control.token
        if walkable:
            walk.advance(layer.decoder_index)
        scores.take()
        walk.peek(layer.decoder_index + 1)
        layer_scores = scores.take()[layer.index]
        if token.rule == "naee":
            threshold = calibrate_naee(layer_scores, budget)
        else:
            threshold = calibrate_threshold(layer_scores, budget, token.k_base)
        thresholds.append(threshold)
        control.threshold = threshold
        control.set_budget(budget)
        bar.advance(1, f"layer {layer.index + 1}/{len(layer_budgets)}")
    return tuple(thresholds)


def _one_for_all(
    walk: LayerWalk,
    controller: Controller,
    scores: _Scores,
    layer_budgets: Sequence[float],
    bar: Bar,
) -> tuple[float, ...]:
    num_layers, budget = len(layer_budgets), sum(layer_budgets)
    depth = len(controller.moe.decoder_layers)
    # a layer at its full budget runs all of it, whatever p is
    k_orig = controller.moe.k_orig
    obey = [layer for layer, k in enumerate(layer_budgets) if k < k_orig[layer]]
    share = sum(layer_budgets[layer] for layer in obey)
    tried: list[tuple[float, float]] = []
    p = 1.0
    for round_number in range(_MAX_ROUNDS if obey else 0):
        controller.reset()
        walk.peek(depth)
        realised = sum(layer.mean for layer in controller.activity())
        seen = scores.take()
        if round_number > 0:
            tried.append((abs(realised - budget), p))
            if tried[-1][0] <= _TOLERANCE * budget:
                break
        p = calibrate_dynamic_moe([seen[layer] for layer in obey], share)
        for control in controller.controls:
            control.threshold = p
        controller.set_budgets(layer_budgets)
        bar.advance(num_layers / _MAX_ROUNDS, f"round {round_number + 1}")
    return (min(tried)[1] if tried else p,) * num_layers
