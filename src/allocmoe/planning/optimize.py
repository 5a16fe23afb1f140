"""From a model and a budget to the plan that measures best.

A profile is a model of the loss, and where it is measured matters. So several are made, each gives
its plan, and the plans are measured on text that no profile has seen, beside Uniform with the same
token rule: a plan that does not beat that is not worth shipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from allocmoe.artifacts import (
    ContextName,
    Evaluation,
    Method,
    Plan,
    Scope,
    Sensitivity,
    TokenRule,
    best_quality,
)
from allocmoe.errors import AllocMoEError
from allocmoe.evaluation.quality import UNMODIFIED, evaluate
from allocmoe.models import inspect_model
from allocmoe.planning.methods import Planner
from allocmoe.profiling.profile import existing_profile, grid, make_context, profile
from allocmoe.progress import Progress
from allocmoe.solver import parse_budget
from allocmoe.text import Text, check_disjoint

CONTEXTS: tuple[ContextName, ...] = ("paper", "single", "around")


@dataclass(frozen=True)
class Optimized:
    """The winner, and the table of what was tried."""

    plan: Plan
    name: str
    evaluation: Evaluation


def optimize(
    model: nn.Module,
    budget: str | float,
    text: Text,
    eval_text: Text,
    directory: str | Path,
    *,
    contexts: Sequence[ContextName] = CONTEXTS,
    scope: Scope | None = "batch",
    k_base: int = 1,
    ks: Sequence[float] | None = None,
    batch_size: int = 4,
    offload: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Optimized:
    """Profile, solve, measure the candidates on `eval_text`, keep the best in `directory`.

    scope: of Alloc-T, or None for plans without a token rule. Profiles are made with the rule on;
    in batch scope where the plan's own scope has thresholds. A profile that is already in
    `directory` and fits is used again.
    """
    check_disjoint(text, eval_text)
    if not contexts:
        raise AllocMoEError("optimize needs at least one context")
    directory, progress = Path(directory), progress or Progress()
    info = inspect_model(model).info
    total = parse_budget(budget, info.k_orig)
    token = TokenRule()
    if scope is not None:
        token = TokenRule("alloc-t", "batch" if scope == "threshold" else scope, k_base)

    def planner(sensitivity: Sensitivity | None) -> Planner:
        return Planner(
            info,
            model=model,
            text=text,
            sensitivity=sensitivity,
            scope=scope or "batch",
            k_base=k_base,
            batch_size=batch_size,
            progress=progress,
        )

    plain: Method = "uniform" if scope is None else "alloc-t"
    solved: Method = "alloc-l" if scope is None else "alloc-moe"
    values = grid(ks, info.k_orig, token)
    least = sum(own[0] for own in values)
    if total < least:
        raise AllocMoEError(
            f"the budget {total} is below {least:g}, the least that the grid of k can make"
        )
    plans: dict[str, Plan] = {plain: planner(None).plan(plain, budget)}
    for number, name in enumerate(contexts, 1):
        around = budget if name == "around" else None
        file = directory / f"sensitivity-{name}{f'-{total}' if around is not None else ''}.json"
        sensitivity = existing_profile(
            file,
            info,
            text,
            context=make_context(name, info.k_orig, around, token),
            token=token,
            ks=values,
            dtype=str(model.dtype),
            batch_size=batch_size,
        )
        if sensitivity is not None:
            progress.note(f"{file} fits and is used again")
        else:
            progress.note(f"profile {number} of {len(contexts)}")
            sensitivity = profile(
                model,
                text,
                context=name,
                budget=around,
                token=token,
                ks=ks,
                batch_size=batch_size,
                offload=offload,
                save_to=file,
                resume=resume,
                progress=progress,
            )
        plans[f"{solved}/{name}"] = planner(sensitivity).plan(solved, budget)

    evaluation = evaluate(model, plans, eval_text, batch_size=batch_size, progress=progress)
    evaluation.save(directory / "candidates.json")
    candidates = [row for row in evaluation.rows if row.name != UNMODIFIED]
    winner = best_quality(candidates)
    if not winner.keeps_budget:
        progress.note(
            f"{winner.name} ran {winner.realised:.2f} activations a token on this text, more than "
            f"the {total}: thresholds drift, and no candidate ran clearly fewer"
        )
    plan = plans[winner.name]
    plan.save(directory / "plan.json")
    return Optimized(plan, winner.name, evaluation)
