"""The paper's analyses: expert load before and after a plan, and which tokens keep experts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from allocmoe.artifacts import Analysis, LayerAnalysis, Plan, SweepRow, TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoEModel, inspect_model
from allocmoe.progress import Progress
from allocmoe.runtime.control import Observed
from allocmoe.runtime.hf import Controller
from allocmoe.runtime.loss import logits_of, overflow_hint
from allocmoe.text import Text, check_ids

_BINS = 10
Floats = NDArray[np.float64]


def analyze(
    model: nn.Module,
    plan: Plan,
    text: Text,
    *,
    name: str = "plan",
    k_base_sweep: Sequence[SweepRow] = (),
    text_sweep: Sequence[SweepRow] = (),
    batch_size: int = 4,
    progress: Progress | None = None,
) -> Analysis:
    """What `plan` does to the routing of `model` on `text`; sweeps are measured by the caller."""
    moe = inspect_model(model)
    plan.check_fits(moe.info)
    if batch_size < 1:
        raise AllocMoEError(f"batch_size must be 1 or more, not {batch_size}")
    check_ids(moe.model, text.ids)
    before = _Routing(moe)
    after = _Routing(moe)
    batches = text.ids.split(batch_size)
    full = tuple(float(k) for k in moe.k_orig)
    with (progress or Progress()).bar("analyze", 2 * len(batches)) as bar:
        for routing, token, budgets in (
            (before, TokenRule(), full),
            (after, plan.token, plan.layer_budgets),
        ):
            with Controller(moe, token, observe=routing.add) as controller, torch.no_grad():
                controller.set_budgets(budgets)
                for ids in batches:
                    logits_of(moe.model, ids.to(moe.model.get_input_embeddings().weight.device))  # type: ignore[operator]
                    bar.advance(1)
                activity = controller.activity()
    return Analysis(
        model=moe.info,
        text=text.info,
        name=name,
        method=plan.method,
        budget=plan.budget,
        token=plan.token.label,
        layer_budgets=plan.layer_budgets,
        realised_per_layer=tuple(layer.mean for layer in activity),
        layers=tuple(
            _layer(before.load[i], after.load[i], after.entropy(i), after.kept(i))
            for i in range(len(moe.layers))
        ),
        k_base_sweep=tuple(k_base_sweep),
        text_sweep=tuple(text_sweep),
    )


class _Routing:
    """The load of each layer's experts, and the entropy and experts of each token."""

    def __init__(self, moe: MoEModel) -> None:
        self._model = moe.model
        self._scores = [_score_kind(moe, layer) for layer in range(len(moe.layers))]
        self.load: list[Floats] = [np.zeros(n) for n in moe.info.num_experts]
        self._entropy: list[list[Floats]] = [[] for _ in moe.layers]
        self._kept: list[list[Floats]] = [[] for _ in moe.layers]

    def add(self, seen: Observed) -> None:
        keep = torch.ones_like(seen.index_TK, dtype=torch.bool)
        if seen.keep_TK is not None:
            keep = seen.keep_TK
        if seen.valid_T is not None:
            keep = keep & seen.valid_T[:, None]
        experts = seen.index_TK[keep]
        counts = torch.bincount(experts, minlength=len(self.load[seen.layer]))
        self.load[seen.layer] += counts.cpu().double().numpy()
        p = _distribution(seen.logits_TE.double(), self._scores[seen.layer])
        valid = slice(None) if seen.valid_T is None else seen.valid_T
        entropy = torch.special.entr(p).sum(1)[valid].cpu()
        if not entropy.isfinite().all():
            raise AllocMoEError(
                f"the routing of MoE layer {seen.layer} is not finite: {overflow_hint(self._model)}"
            )
        self._entropy[seen.layer].append(entropy.numpy())
        self._kept[seen.layer].append(keep.sum(1)[valid].cpu().double().numpy())

    def entropy(self, layer: int) -> Floats:
        return np.concatenate(self._entropy[layer])

    def kept(self, layer: int) -> Floats:
        return np.concatenate(self._kept[layer])


def _score_kind(moe: MoEModel, layer: int) -> str:
    kind = moe.family.score
    return str(moe.layers[layer].router.expert_selection_fn) if kind == "config" else kind


def _distribution(logits_TE: torch.Tensor, score: str) -> torch.Tensor:
    """The routing as a distribution over all experts."""
    if score == "sigmoid":
        scores = logits_TE.sigmoid()
        return scores / scores.sum(1, keepdim=True)
    return logits_TE if score == "given" else logits_TE.softmax(1)


def _layer(before: Floats, after: Floats, entropy: Floats, kept: Floats) -> LayerAnalysis:
    p, q = before / before.sum(), after / after.sum()
    most = math.log(len(p))
    return LayerAnalysis(
        load_before=tuple(p.tolist()),
        load_after=tuple(q.tolist()),
        spearman=spearman(p, q) or 0.0,
        entropy_before=_entropy(p) / most,
        entropy_after=_entropy(q) / most,
        js_divergence=max(0.0, _entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2),
        entropy_correlation=spearman(entropy, kept),
        kept_by_entropy=tuple(
            (float(entropy[rows].mean()), float(kept[rows].mean()), float(len(rows)))
            for rows in np.array_split(np.argsort(entropy, kind="stable"), _BINS)
            if len(rows)
        ),
    )


def _entropy(p: Floats) -> float:
    positive = p[p > 0]
    return float(-(positive * np.log(positive)).sum())


def spearman(x: Floats, y: Floats) -> float | None:
    """The correlation of the ranks, ties at their mean rank; None if one side never varies."""
    a, b = _ranks(x), _ranks(y)
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[inverse]
    return ranks
