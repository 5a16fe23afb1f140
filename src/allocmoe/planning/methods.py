"""Every method of the paper by its name: what it needs, and the plan it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from torch import nn

from allocmoe.artifacts import Method, ModelInfo, Normalisation, Plan, Scope, Sensitivity, TokenRule
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoEModel, inspect_model
from allocmoe.planning.solve import solve
from allocmoe.profiling.calibrate import calibrate
from allocmoe.profiling.lexi import lexi_distances
from allocmoe.progress import Progress
from allocmoe.solver import (
    ascending,
    descending,
    evolve,
    parse_budget,
    solve_frontier,
    uniform,
    uniform_mean,
)
from allocmoe.text import Text

METHODS: tuple[Method, ...] = get_args(Method)
NEEDS_SENSITIVITY = frozenset({"alloc-l", "alloc-moe"})
NEEDS_WEIGHTS = frozenset({"lexi", "naee", "dynamic-moe"})
NEEDS_TEXT = frozenset({"naee", "dynamic-moe"})

_HEURISTICS: dict[str, Callable[..., tuple[int, ...]]] = {
    "uniform": uniform,
    "ascending": ascending,
    "descending": descending,
}


@dataclass
class Planner:
    """Makes plans for one model; what several plans share is measured once.

    Give what the wanted methods need: a `sensitivity` for alloc-l and alloc-moe, the `model` for
    lexi, and `model` and `text` for naee, dynamic-moe and alloc-t in threshold scope. Where no
    `scope` or `k_base` is given, alloc-moe runs alloc-t as the sensitivity was measured with it,
    and else it is in batch scope with one expert for every token.
    """

    info: ModelInfo
    model: nn.Module | None = None
    text: Text | None = None
    sensitivity: Sensitivity | None = None
    scope: Scope | None = None
    k_base: int | None = None
    renormalise_over: int | None = None
    normalisation: Normalisation = "log"
    lexi_search: Literal["exact", "evolve"] = "exact"
    batch_size: int = 4
    progress: Progress = field(default_factory=Progress)
    _lexi: list[list[float]] | None = None

    def __post_init__(self) -> None:
        most = max(self.info.k_orig)
        for name, value in (("k_base", self.k_base), ("renormalise_over", self.renormalise_over)):
            if value is not None and not 0 <= value <= most:
                raise AllocMoEError(f"{name} must lie in 0..{most}, the model's own k: {value}")

    def plan(self, method: Method, budget: str | float) -> Plan:
        """The plan of `method` at `budget`."""
        if method not in METHODS:
            raise AllocMoEError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
        if method in NEEDS_SENSITIVITY:
            return self._from_sensitivity(method, budget)
        total = parse_budget(budget, self.info.k_orig)
        split: tuple[float, ...]
        if method in _HEURISTICS:
            split, rule = _HEURISTICS[method](self.info.k_orig, total), "none"
        elif method == "lexi":
            split, rule = self._lexi_split(total), "none"
        else:
            split, rule = uniform_mean(self.info.k_orig, total), method
        return Plan(
            model=self.info,
            text=self.text.info if self.text is not None and method in self._uses_text() else None,
            method=method,
            layer_budgets=tuple(float(k) for k in split),
            token=self._token(rule, split),
            budget_asked=str(budget),
            budget=total,
            budget_used=float(sum(split)),
            predicted_loss=None,
            normalisation=None,
            context=None,
        )

    def _from_sensitivity(self, method: Method, budget: str | float) -> Plan:
        if self.sensitivity is None:
            raise AllocMoEError(
                f"the method {method} needs a sensitivity: make one with `allocmoe profile`"
            )
        difference = self.sensitivity.model.difference(self.info)
        if difference is not None:
            raise AllocMoEError(
                f"the sensitivity is of {self.sensitivity.model.id}, not of {self.info.id}: "
                f"{difference}"
            )
        plan = solve(
            self.sensitivity,
            budget,
            method="alloc-moe" if method == "alloc-moe" else "alloc-l",
            normalisation=self.normalisation,
        )
        if plan.budget_used < plan.budget:
            self.progress.note(
                f"{method} spends {plan.budget_used:g} of the {plan.budget}: by this profile more "
                "would not help"
            )
        rule = "alloc-t" if method == "alloc-moe" else "none"
        token = self._token(rule, plan.layer_budgets, plan.token)
        info, measured = self.info, self.sensitivity.model.fingerprint
        if info.fingerprint is None:
            info = replace(info, fingerprint=measured)  # the weights were not read
        elif measured not in (None, info.fingerprint):
            self.progress.note("the sensitivity was measured on other weights of this architecture")
        calibrated = self.text.info if token.thresholds and self.text is not None else None
        return replace(plan, model=info, token=token, threshold_text=calibrated)

    def _uses_text(self) -> frozenset[str]:
        return NEEDS_TEXT | {"alloc-t"} if self.scope == "threshold" else NEEDS_TEXT

    def _token(
        self, rule: Any, split: Sequence[float], measured: TokenRule | None = None
    ) -> TokenRule:
        """The token rule, calibrated on the text where it has thresholds."""
        measured = measured or TokenRule("alloc-t", "batch")
        scope = (self.scope or measured.scope) if rule == "alloc-t" else None
        k_base = measured.k_base if self.k_base is None else self.k_base
        if rule not in NEEDS_TEXT and scope != "threshold":
            return TokenRule(rule, scope, k_base, None, self.renormalise_over)
        if self.model is None or self.text is None:
            name = rule if scope is None else f"{rule} in {scope} scope"
            raise AllocMoEError(f"{name} is calibrated on text: give a model and a text")
        return calibrate(
            self._moe(),
            self.text,
            split,
            rule=rule,
            scope=scope,
            k_base=k_base,
            renormalise_over=self.renormalise_over,
            batch_size=self.batch_size,
            progress=self.progress,
        )

    def _lexi_split(self, total: int) -> tuple[float, ...]:
        """LExI's split by the search that was asked for; the other one's cost is told beside it."""
        if self._lexi is None:
            self._lexi = lexi_distances(self._moe(), progress=self.progress)
        ks = [[float(k) for k in range(1, own + 1)] for own in self.info.k_orig]
        exact = solve_frontier(self._lexi, ks).at(total)
        found, cost = evolve(self._lexi, self.info.k_orig, total)
        gap = cost / exact.cost - 1 if exact.cost > 0 else 0.0
        self.progress.note(
            f"LExI at {total}: exact optimum {exact.cost:.4g}, evolutionary search {cost:.4g} "
            f"({gap:+.2%})"
        )
        return exact.layer_budgets if self.lexi_search == "exact" else found

    def _moe(self) -> MoEModel:
        if self.model is None:
            raise AllocMoEError("this method measures the model: give its weights")
        return inspect_model(self.model)


def make_plan(
    method: Method,
    budget: str | float,
    *,
    model: nn.Module | None = None,
    sensitivity: Sensitivity | None = None,
    **options: Any,
) -> Plan:
    """The plan of one method; see `Planner` for the options."""
    if model is None and sensitivity is None:
        raise AllocMoEError("a plan needs a model or a sensitivity")
    info = inspect_model(model).info if model is not None else sensitivity.model  # type: ignore[union-attr]
    return Planner(info, model=model, sensitivity=sensitivity, **options).plan(method, budget)
