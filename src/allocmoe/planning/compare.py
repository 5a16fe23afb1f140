"""All methods at several budgets on one model and one text."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from allocmoe.artifacts import Evaluation, Method, Plan
from allocmoe.errors import AllocMoEError
from allocmoe.evaluation.quality import evaluate
from allocmoe.planning.methods import METHODS, Planner
from allocmoe.progress import Progress
from allocmoe.text import Text


def compare(
    model: nn.Module,
    planner: Planner,
    eval_text: Text,
    budgets: Sequence[str | float],
    *,
    methods: Sequence[Method] = METHODS,
    progress: Progress | None = None,
) -> tuple[Evaluation, dict[str, Plan]]:
    """The quality of every method at every budget, on `eval_text`, and the plans behind them.

    A method that cannot be had on this model is left out with a note, not silently.
    """
    progress = progress or Progress()
    plans: dict[str, Plan] = {}
    for budget in budgets:
        for method in methods:
            try:
                plan = planner.plan(method, budget)
            except AllocMoEError as error:
                if len(methods) == 1:
                    raise
                progress.note(f"{method} at {budget} is left out: {error}")
                continue
            plans[f"{method}@{plan.budget}"] = plan
    if not plans:
        raise AllocMoEError("no method could make a plan")
    result = evaluate(model, plans, eval_text, batch_size=planner.batch_size, progress=progress)
    return result, plans
