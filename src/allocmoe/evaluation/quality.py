"""Perplexity of plans, and their distance from the unmodified model, on one text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from allocmoe.artifacts import Evaluation, LayerActivity, Plan, Quality, TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoEModel, inspect_model
from allocmoe.progress import Progress
from allocmoe.runtime.engine import Engine
from allocmoe.runtime.hf import Controller
from allocmoe.runtime.loss import (
    chunks,
    logits_of,
    nll_sum,
    num_predictions,
    overflow_hint,
    perplexity,
)
from allocmoe.text import Text, check_ids, note_length

UNMODIFIED = "unmodified"


def evaluate(
    model: nn.Module | Engine,
    plans: Mapping[str, Plan],
    text: Text,
    *,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> Evaluation:
    """The quality of every plan on `text`, with the unmodified model as the first row.

    model: a transformers model, or an engine that runs one (`VllmEngine`), which makes its own
      batches and tells no KL divergence.
    """
    moe = inspect_model(model) if isinstance(model, nn.Module) else model.moe
    named = name_plans(moe, plans)
    if batch_size < 1:
        raise AllocMoEError(f"batch_size must be 1 or more, not {batch_size}")
    progress = progress or Progress()
    check_ids(moe.model, text.ids)
    note_length(moe.model, text, progress)
    if isinstance(model, nn.Module):
        sums = _run(moe, named, text.ids.split(batch_size), progress)
    else:
        sums = _run_engine(model, named, text.ids, progress)
    predictions = num_predictions(text.ids)
    base = sums[UNMODIFIED].quality(UNMODIFIED, None, moe, predictions, math.nan)
    rows = [
        total.quality(name, plan, moe, predictions, base.perplexity)
        for (name, plan), total in zip(named, sums.values(), strict=True)
    ]
    return Evaluation(model=moe.info, text=text.info, batch_size=batch_size, rows=tuple(rows))


def _run(
    moe: MoEModel,
    named: list[tuple[str, Plan | None]],
    batches: Sequence[torch.Tensor],
    progress: Progress,
) -> dict[str, _Sums]:
    """All plans see a batch before the next one comes, so the unmodified model runs only once."""
    device = moe.model.get_input_embeddings().weight.device  # type: ignore[operator]
    sums = {name: _Sums() for name, _ in named}
    with progress.bar("evaluate", len(batches) * len(named)) as bar:
        for number, ids in enumerate(batches):
            reference: torch.Tensor | None = None
            for name, plan in named:
                logits = sums[name].run(
                    moe, plan, ids.to(device), whole=len(ids) == len(batches[0])
                )
                if reference is None:
                    reference = logits
                sums[name].compare(reference, logits)
                bar.advance(1, f"batch {number + 1}/{len(batches)}, {name}")
    return sums


def _run_engine(
    engine: Engine,
    named: list[tuple[str, Plan | None]],
    ids_NS: torch.Tensor,
    progress: Progress,
) -> dict[str, _Sums]:
    sums: dict[str, _Sums] = {}
    reference: torch.Tensor | None = None
    with progress.bar("evaluate", len(named)) as bar:
        for name, plan in named:
            engine.follow(plan)
            engine.reset()
            nll, likeliest = engine.losses(ids_NS)
            if reference is None:
                reference = likeliest
            same = float((likeliest == reference).sum())
            sums[name] = _Sums(nll, None, same, likeliest.numel(), engine.activity())
            bar.advance(1, name)
    engine.follow(None)
    return sums


@dataclass
class _Sums:
    """What one plan adds up to over the batches."""

    nll: torch.Tensor | float = 0.0
    kl: torch.Tensor | float | None = 0.0
    same: torch.Tensor | float = 0.0
    compared: int = 0
    activity: list[LayerActivity] = field(default_factory=list)

    @torch.no_grad()
    def run(
        self, moe: MoEModel, plan: Plan | None, ids: torch.Tensor, *, whole: bool
    ) -> torch.Tensor:
        with controlled(moe, plan) as controller:
            logits = logits_of(moe.model, ids)
            ran = controller.activity()
        if not whole:  # fewer sequences load fewer experts a step
            ran = [replace(layer, distinct_at_positions=0, positions=0) for layer in ran]
        before = self.activity
        self.activity = [a + b for a, b in zip(before, ran, strict=True)] if before else ran
        self.nll = self.nll + nll_sum(logits, ids)
        return logits

    @torch.no_grad()
    def compare(self, reference_BSV: torch.Tensor, logits_BSV: torch.Tensor) -> None:
        """KL(reference || plan) and equal argmax, over every position."""
        assert self.kl is not None
        reference, logits = reference_BSV.flatten(0, 1), logits_BSV.flatten(0, 1)
        self.compared += logits.shape[0]
        for p, q in chunks(reference, logits):
            log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            self.kl = self.kl + (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
            self.same = self.same + (p.argmax(-1) == q.argmax(-1)).double().sum()

    def quality(
        self, name: str, plan: Plan | None, moe: MoEModel, predictions: int, base: float
    ) -> Quality:
        value = perplexity(float(self.nll), predictions)
        if not math.isfinite(value):
            raise AllocMoEError(f"the perplexity of {name} is {value}: {overflow_hint(moe.model)}")
        layers = self.activity
        return Quality(
            name=name,
            method=UNMODIFIED if plan is None else plan.method,
            token="none" if plan is None else plan.token.label,
            budget=float(sum(moe.k_orig)) if plan is None else float(plan.budget),
            perplexity=value,
            log_rise=0.0 if plan is None else math.log(value) - math.log(base),
            kl=None if self.kl is None else max(0.0, float(self.kl) / self.compared),
            top1_agreement=float(self.same) / self.compared,
            realised=sum(layer.mean for layer in layers),
            realised_per_layer=tuple(layer.mean for layer in layers),
            distinct_per_step=tuple(layer.distinct_per_step for layer in layers),
        )


def name_plans(moe: MoEModel, plans: Mapping[str, Plan]) -> list[tuple[str, Plan | None]]:
    """The unmodified model, which is no plan, and the plans after it."""
    for plan in plans.values():
        plan.check_fits(moe.info)
    if UNMODIFIED in plans:
        raise AllocMoEError(f"a plan cannot be named {UNMODIFIED!r}")
    return [(UNMODIFIED, None), *plans.items()]


def controlled(moe: MoEModel, plan: Plan | None) -> Controller:
    controller = Controller(moe, TokenRule() if plan is None else plan.token)
    if plan is not None:
        controller.set_budgets(plan.layer_budgets)
    return controller
