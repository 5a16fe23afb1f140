"""Alloc-L: the best split of a budget over the layers, from a measured sensitivity.

Needs no model and no torch: profile once, solve for any budget in milliseconds.
"""

from __future__ import annotations

from typing import Literal

from allocmoe.artifacts import Normalisation, Plan, Sensitivity, TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.solver import parse_budget, solve_frontier


def solve(
    sensitivity: Sensitivity,
    budget: str | float,
    *,
    method: Literal["alloc-l", "alloc-moe"] = "alloc-l",
    token: TokenRule | None = None,
    normalisation: Normalisation = "log",
) -> Plan:
    """The plan that minimises the summed sensitivity within `budget`; a full one is all of it.

    `alloc-moe` adds a token rule: the one given, or the one that was on while profiling, or
    alloc-t in batch scope.
    """
    measured = sensitivity.token
    if method == "alloc-l":
        if measured.rule != "none":
            raise AllocMoEError(
                f"this sensitivity was measured with {measured.label} on: "
                "solve it with method alloc-moe, or profile without a token rule"
            )
        rule = TokenRule()
    else:
        rule = token or (measured if measured.rule != "none" else TokenRule("alloc-t", "batch"))
    total = parse_budget(budget, sensitivity.model.k_orig)
    cost = sensitivity.cost(normalisation)
    if total == sum(sensitivity.model.k_orig):
        # the untouched model, whatever a noisy row says of fewer experts
        loss = sum(row[-1] for row in cost)
        budgets = tuple(float(k) for k in sensitivity.model.k_orig)
    else:
        allocation = solve_frontier(cost, sensitivity.ks).at(total)
        assert allocation.used <= total + 1e-9, "the solver exceeded its budget"
        loss, budgets = allocation.cost, allocation.layer_budgets
    return Plan(
        model=sensitivity.model,
        text=sensitivity.text,
        method=method,
        layer_budgets=budgets,
        token=rule,
        budget_asked=str(budget),
        budget=total,
        budget_used=sum(budgets),
        predicted_loss=loss,
        normalisation=normalisation,
        context=sensitivity.context.name,
    )
