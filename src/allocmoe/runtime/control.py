"""One MoE layer under a budget: its scores, its selection, and the count of what ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import torch

from allocmoe import routing
from allocmoe.artifacts import LayerActivity, TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.kernels import Pairs
from allocmoe.models import Family, MoELayer
from allocmoe.runtime.step import CurrentStep, Step


@dataclass(frozen=True)
class Observed:
    """The routing of one forward in one layer, in the model's order of preference.

    `keep_TK` is None where every pair runs, `valid_T` where there is no padding.
    """

    layer: int
    index_TK: torch.Tensor
    scores_TK: torch.Tensor
    logits_TE: torch.Tensor
    keep_TK: torch.Tensor | None
    valid_T: torch.Tensor | None


Observer = Callable[[Observed], None]


class LayerControl:
    """Decides for one layer which of the router's (token, expert) pairs run."""

    @torch.inference_mode(False)  # what that makes could not be written to outside of it
    def __init__(
        self,
        layer: MoELayer,
        family: Family,
        token: TokenRule,
        current: CurrentStep | None = None,
        *,
        counts: bool = True,
        observe: Observer | None = None,
        bias: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """`bias` and `device` stand in for those of a layer that is a skeleton."""
        self.layer = layer
        self.counts = counts
        self._observe = observe
        self.family = family
        self.token = token
        self._current = current or CurrentStep()
        self.stock_implementation: str | None = None
        self.renormalises = _renormalises(layer, family)
        self._bias = _bias(layer, family) if bias is None else bias
        self.device = device or layer.experts.down_proj.device
        self.counter = Counter(layer.num_experts, self.device)
        self._logits: torch.Tensor | None = None
        self._params: torch.Tensor | None = None
        if token.renormalise_over is not None:
            check_renormalises(layer, family)
        # whether any budget could ask for a mask
        self.may_mask = token.selects or not family.top_k_settable
        thresholds = token.thresholds
        self.threshold = None if thresholds is None else thresholds[layer.index]
        self.set_budget(layer.k_orig)

    def set_budget(self, budget: float) -> None:
        if not 0 < budget <= self.layer.k_orig:
            raise AllocMoEError(
                f"MoE layer {self.layer.index}: {budget} is not a budget in 0..{self.layer.k_orig}"
            )
        self.budget = budget
        # a full budget is the untouched model, bit for bit
        self.masks = self.may_mask and budget < self.layer.k_orig
        if not self.may_mask:
            self.layer.top_k_owner.top_k = int(budget)  # type: ignore[assignment]

        self._write_params()

    def _write_params(self) -> None:
        """Budget and threshold where the selection kernel reads them, in a captured graph too."""
        if not self.may_mask or self.device.type == "meta":
            return
        params = torch.tensor([self.budget, self.threshold or 0.0], dtype=torch.float64)
        if self._params is None:
            self._params = params.to(self.device)
        else:
            self._params.copy_(params)

    @property
    def step(self) -> Step:
        return self._current.step

    @property
    def observed(self) -> bool:
        return self._observe is not None

    def restore(self) -> None:
        if not self.may_mask:
            self.layer.top_k_owner.top_k = self.layer.k_orig  # type: ignore[assignment]

    def see_router(self, output: Any) -> None:
        """After the router: keep its logits, whatever it returns them beside."""
        outputs = output if isinstance(output, tuple) else (output,)
        self._logits = next(
            t for t in outputs if t.is_floating_point() and t.shape[-1] == self.layer.num_experts
        )

    def see_routing(self, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        """Before the experts: count, and show to whoever observes, what stock code runs."""
        if self.masks:
            return
        if self._observe is not None:
            index, _, scores = self.rank(index_TK, weights_TK)
            self.observe(index, scores, None)
        if self.counts:
            self.counter.add_dense(index_TK, self.step)

    def observe(
        self, index_TK: torch.Tensor, scores_TK: torch.Tensor, keep_TK: torch.Tensor | None
    ) -> None:
        if self._observe is not None:
            assert self._logits is not None
            logits = self._logits.reshape(-1, self.layer.num_experts)
            valid = self.step.valid_on(index_TK.device)
            self._observe(Observed(self.layer.index, index_TK, scores_TK, logits, keep_TK, valid))

    def rank(
        self, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Experts, weights and scores of each token in the model's own order of preference.

        Many routers do not sort their top-k, and some choose by score plus bias.
        """
        scores, choice = self._scores(index_TK)
        order = choice.argsort(dim=1, descending=True, stable=True)
        return index_TK.gather(1, order), weights_TK.gather(1, order), scores.gather(1, order)

    def _scores(self, index_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._logits is not None, "the experts ran before their router"
        logits = self._logits.reshape(-1, self.layer.num_experts).float()
        chosen = logits.gather(1, index_TK)
        score = self._score
        if score == "softmax":
            scores = (chosen - logits.logsumexp(dim=1, keepdim=True)).exp()
        elif score == "sigmoid":
            scores = chosen.sigmoid()
        else:
            scores = chosen
        if self._bias is None:
            return scores, scores
        on = scores if self.family.bias_on == "score" else chosen
        return scores, on + self._bias.flatten().to(on)[index_TK]

    @property
    def _score(self) -> str:
        score: str = self.family.score
        if score == "config":
            score = self.layer.router.expert_selection_fn  # type: ignore[assignment]
        return score

    def select_fused(
        self, index_TK: torch.Tensor, weights_TK: torch.Tensor, **launched: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rank`, `select` and `reweigh` in one kernel; a dropped pair's expert is num_experts.

        With `launched`, more options of `launch_select`, it is no operator of torch.
        """
        from allocmoe.kernels.fused.launch import launch_select
        from allocmoe.kernels.fused.ops import select_op

        token, logits = self.token, self._logits
        assert logits is not None, "the experts ran before their router"
        self._logits = None
        rule: str = token.rule
        base, pools = 1, 1
        if rule == "none":
            rule, base = "top_k", int(self.budget)
        elif rule == "alloc-t":
            base = routing.base_of(self.budget, token.k_base)
            rule = "threshold" if token.scope == "threshold" else "pool"
            pools = self.step.num_sequences if token.scope == "sequence" else 1
        valid = self.step.valid_on(index_TK.device)
        renormalise = self.renormalises and token.rule != "dynamic-moe"
        assert self._params is not None
        given: tuple[Any, ...] = (
            index_TK,
            weights_TK,
            logits.reshape(-1, self.layer.num_experts),
            None if self._bias is None else self._bias.flatten(),
            valid,
            self._params,
        )
        settings: dict[str, Any] = dict(
            num_experts=self.layer.num_experts,
            rule=rule,
            score=self._score,
            bias_on="none" if self._bias is None else self.family.bias_on,
            base=base,
            num_pools=pools,
            renormalise=renormalise,
            renormalise_over=token.renormalise_over or 0,
        )
        if launched:
            return launch_select(*given, **(settings | launched))
        chosen: tuple[torch.Tensor, torch.Tensor] = select_op(*given, **settings)
        return chosen

    def select(self, scores_TK: torch.Tensor) -> torch.Tensor:
        token, valid = self.token, self.step.valid_on(scores_TK.device)
        if token.rule == "none":
            return routing.select_top_k(scores_TK, int(self.budget), valid)
        if token.rule == "naee":
            return routing.select_naee(scores_TK, self._threshold, valid)
        if token.rule == "dynamic-moe":
            return routing.select_dynamic_moe(scores_TK, self._threshold, valid)
        if token.scope == "threshold":
            return routing.select_threshold(
                scores_TK, self.budget, self._threshold, token.k_base, valid
            )
        pools = self.step.num_sequences if token.scope == "sequence" else 1
        return routing.select_sequence(scores_TK, self.budget, pools, token.k_base, valid)

    @property
    def _threshold(self) -> float:
        assert self.threshold is not None
        return self.threshold

    def reweigh(
        self, weights_TK: torch.Tensor, scores_TK: torch.Tensor, keep_TK: torch.Tensor
    ) -> torch.Tensor:
        # Dynamic-MoE leaves the weights as they are
        if not self.renormalises or self.token.rule == "dynamic-moe":
            return weights_TK
        return routing.reweigh(weights_TK, scores_TK, keep_TK, self.token.renormalise_over)

    def num_kept(self, num_tokens: int) -> int | None:
        """How many pairs run, where that is known without asking the device."""
        num_valid = num_tokens if self.step.num_valid is None else self.step.num_valid
        if self.token.rule == "none":
            return int(self.budget) * num_valid
        if self.token.scope == "batch":
            return routing.num_pairs(self.budget, num_valid)
        if self.token.scope == "sequence" and self.step.num_valid is None:
            sequences = self.step.num_sequences
            return sequences * routing.num_pairs(self.budget, num_tokens // sequences)
        return None


class Counter:
    """Counts a layer's activations where they run, so that the host waits for nothing. The totals
    keep their place in memory: a replayed CUDA graph counts like any forward."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._num_experts = num_experts
        on = "cpu" if device.type == "meta" else device
        self._totals = torch.zeros(len(fields(LayerActivity)), dtype=torch.int64, device=on)

    def reset(self) -> None:
        self._totals.zero_()

    def add_dense(self, index_TK: torch.Tensor, step: Step) -> None:
        """A forward in which every pair runs, those of padding too."""
        T, K = index_TK.shape
        valid = step.count(T, index_TK.device)
        self._add_columns(index_TK, step, valid * K, (T - valid) * K)

    def add_kept(self, index_TK: torch.Tensor, step: Step) -> None:
        """A forward in which the pairs run whose expert is in range."""
        self._add_columns(index_TK, step, (index_TK < self._num_experts).sum())

    def add_pairs(self, pairs: Pairs, num_tokens: int, step: Step) -> None:
        token = pairs.slot // pairs.num_columns
        self._add(token, pairs.expert, num_tokens, step, pairs.expert.shape[0])

    def _add_columns(
        self,
        index_TK: torch.Tensor,
        step: Step,
        activations: torch.Tensor | int,
        padding: torch.Tensor | int = 0,
    ) -> None:
        T, K = index_TK.shape
        token = torch.arange(T, device=index_TK.device).repeat_interleave(K)
        self._add(token, index_TK.flatten(), T, step, activations, padding)

    def _add(
        self,
        token: torch.Tensor,
        expert: torch.Tensor,
        num_tokens: int,
        step: Step,
        activations: torch.Tensor | int,
        padding: torch.Tensor | int = 0,
    ) -> None:
        length = num_tokens // step.num_sequences
        # one column more for pairs that do not run
        columns = self._num_experts + 1
        hit = torch.zeros(length * columns, dtype=torch.bool, device=expert.device)
        hit.index_fill_(0, token % length * columns + expert, True)
        hit = hit.view(length, columns)[:, :-1]
        counts = dict(
            tokens=step.count(num_tokens, expert.device),
            activations=activations,
            padding_activations=padding,
            distinct_experts=hit.any(0).sum(),
            forwards=1,
            distinct_at_positions=hit.sum(),
            positions=length,
        )
        # a layer whose weights are elsewhere while it rests runs on another device
        with torch.inference_mode(False):
            self._totals = self._totals.to(expert.device)
        for field, total in zip(fields(LayerActivity), self._totals.unbind(), strict=True):
            total.add_(counts[field.name])

    def read(self) -> LayerActivity:
        return LayerActivity(*self._totals.tolist())


def check_renormalises(layer: MoELayer, family: Family) -> None:
    if not _renormalises(layer, family):
        raise AllocMoEError(
            f"renormalise_over has no meaning here: this {family.name} model does not "
            "renormalise its weights"
        )


def _renormalises(layer: MoELayer, family: Family) -> bool:
    if family.renormalise != "config":
        return family.renormalise == "always"
    if getattr(layer.router, "expert_selection_fn", None) == "softmax":
        return True
    return bool(layer.router.norm_topk_prob)


def _bias(layer: MoELayer, family: Family) -> torch.Tensor | None:
    """The selection bias, or None where the family or this model's config has none."""
    if family.bias is None:
        return None
    try:
        return attrgetter(family.bias)(layer)  # type: ignore[no-any-return]
    except AttributeError:
        return None
