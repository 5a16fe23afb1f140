"""How much a plan depends on `k_base` and on the text it was calibrated on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from allocmoe.artifacts import Plan, SweepRow
from allocmoe.errors import AllocMoEError
from allocmoe.evaluation.quality import evaluate
from allocmoe.planning.solve import solve
from allocmoe.profiling.profile import profile
from allocmoe.progress import Progress
from allocmoe.text import Text, check_disjoint


def sweep_k_base(
    model: nn.Module,
    plan: Plan,
    eval_text: Text,
    *,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> list[SweepRow]:
    """The plan's layer budgets under Alloc-T with every k_base from 0 up."""
    check_k_base_sweep(plan)
    plans = {
        str(k): replace(plan, token=replace(plan.token, k_base=k))
        for k in range(max(plan.model.k_orig))
    }
    return _measure(model, plans, eval_text, batch_size, progress)


def check_k_base_sweep(plan: Plan) -> None:
    if plan.token.scope not in ("batch", "sequence"):
        raise AllocMoEError(
            f"k_base is swept under alloc-t in batch or sequence scope, not {plan.token.label}"
        )


def sweep_texts(
    model: nn.Module,
    budget: str | float,
    texts: Mapping[str, Text],
    eval_text: Text,
    *,
    batch_size: int = 4,
    progress: Progress | None = None,
) -> list[SweepRow]:
    """Alloc-MoE at `budget`, profiled on each of `texts` in turn, measured on `eval_text`."""
    for text in texts.values():
        check_disjoint(text, eval_text)
    plans = {}
    for name, text in texts.items():
        sensitivity = profile(model, text, batch_size=batch_size, progress=progress)
        plans[name] = solve(sensitivity, budget, method="alloc-moe")
    return _measure(model, plans, eval_text, batch_size, progress)


def _measure(
    model: nn.Module,
    plans: Mapping[str, Plan],
    text: Text,
    batch_size: int,
    progress: Progress | None,
) -> list[SweepRow]:
    result = evaluate(model, plans, text, batch_size=batch_size, progress=progress)
    return [
        SweepRow(
            row.name, row.perplexity, row.log_rise, row.realised, plans[row.name].layer_budgets
        )
        for row in result.rows[1:]
    ]
