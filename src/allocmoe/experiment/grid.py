"""The cells of an experiment: the smallest steps that are run, kept and resumed.

    profile   the sensitivity on one calibration text, in one context
    plan      one method at one budget
    text      all plans of one budget on one text
    task      one plan on one task
    analysis  the routing under Alloc-MoE at half the budget
    speed     prefill and decode times

A seed draws other calibration and measurement sequences. A plan that depends on no text is made
once, for seed 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from allocmoe.artifacts import Method, ModelInfo
from allocmoe.errors import AllocMoEError
from allocmoe.evaluation.quality import UNMODIFIED
from allocmoe.experiment.settings import ModelSettings, Settings
from allocmoe.planning.methods import NEEDS_SENSITIVITY, NEEDS_TEXT

Kind = Literal["profile", "plan", "text", "task", "analysis", "speed"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# of Alloc-T, everywhere but in the sweep over it
K_BASE = 1


@dataclass(frozen=True)
class PlanName:
    """One plan of the experiment. text, context: of calibration, by their place in the settings."""

    method: Method
    budget: int
    seed: int = 0
    text: int = 0
    k_base: int = K_BASE
    context: int = 0

    @property
    def label(self) -> str:
        parts = [f"{self.method}@{self.budget}"]
        if self.k_base != K_BASE:
            parts.append(f"k{self.k_base}")
        if self.text:
            parts.append(f"t{self.text}")
        if self.context:
            parts.append(f"c{self.context}")
        if self.seed:
            parts.append(f"s{self.seed}")
        return "-".join(parts)


@dataclass(frozen=True)
class Cell:
    """needs: the cells whose results it takes. What the other fields mean depends on the kind."""

    kind: Kind
    needs: tuple[str, ...] = ()
    plan: PlanName | None = None
    text: int = 0
    context: int = 0
    seed: int = 0
    budget: int = 0
    task: str = ""

    @property
    def id(self) -> str:
        what = {
            "profile": f"t{self.text}-s{self.seed}" + (f"-c{self.context}" if self.context else ""),
            "plan": self.plan.label if self.plan else "",
            "text": f"{self.budget}-t{self.text}-s{self.seed}",
            "task": f"{self.task}-{self.plan.label if self.plan else UNMODIFIED}",
            "analysis": f"s{self.seed}",
            "speed": "all",
        }[self.kind]
        return f"{self.kind}-{what}"


@dataclass(frozen=True)
class Grid:
    """The cells in an order in which each finds what it needs, and the plans they are about."""

    cells: tuple[Cell, ...]
    # the model's own, in the order of the settings
    budgets: tuple[int, ...]
    half: int
    plans: tuple[PlanName, ...]

    def only(self, kinds: Sequence[str]) -> Grid:
        """The cells of some kinds, and those that they need."""
        wanted = {cell.id for cell in self.cells if cell.kind in kinds}
        for cell in reversed(self.cells):
            if cell.id in wanted:
                wanted.update(cell.needs)
        return replace(self, cells=tuple(cell for cell in self.cells if cell.id in wanted))

    def counts(self) -> dict[Kind, int]:
        return {kind: sum(cell.kind == kind for cell in self.cells) for kind in KINDS}


def own_budgets(model: ModelSettings, info: ModelInfo) -> dict[int, int]:
    """The settings' budgets as the same share of another model's activations."""
    full = sum(info.k_orig)
    found = {budget: budget * full // model.full for budget in model.budgets}
    if len({*found.values()}) < len(found):
        raise AllocMoEError(
            f"{info.id} has too few activations ({full}) to tell the budgets apart: "
            f"{', '.join(map(str, model.budgets))} of {model.full}"
        )
    least = min(found, key=found.__getitem__)
    if found[least] < len(info.k_orig):
        raise AllocMoEError(
            f"the budget {least} of {model.full} is {found[least]} of {info.id}'s {full} "
            f"activations: its {len(info.k_orig)} MoE layers need one each"
        )
    return found


def make_grid(
    settings: Settings, model: ModelSettings, info: ModelInfo, tasks: Sequence[str]
) -> Grid:
    """tasks: those of the settings that can be run."""
    scaled = own_budgets(model, info)
    budgets, half = tuple(scaled.values()), scaled[model.half]
    main = [
        PlanName(method, budget, seed)
        for seed in range(settings.seeds)
        for budget in budgets
        for method in settings.methods
        if seed == 0 or depends_on_text(settings, method)
    ]
    sweeps = [
        *(
            PlanName("alloc-t", budget, k_base=k)
            for budget in budgets
            for k in range(max(info.k_orig))
            if k != K_BASE and "alloc-t" in settings.methods
        ),
        *(
            PlanName("alloc-l", budget, text=text)
            for budget in budgets
            for text in range(1, len(settings.calibration.texts))
            if "alloc-l" in settings.methods
        ),
        *(
            PlanName(method, budget, seed, context=context)
            for seed in range(settings.seeds)
            for budget in budgets
            for context in range(1, len(settings.calibration.contexts))
            for method in settings.methods
            if method in NEEDS_SENSITIVITY
        ),
    ]
    plans = [*main, *sweeps]
    scored = [
        plan
        for plan in (plans if settings.tasks.sweeps else main)
        if plan.seed < settings.tasks.seeds
    ]
    cells = [
        *_profiles(plans),
        *(Cell("plan", _needs_of_plan(plan), plan) for plan in plans),
        *_texts(settings, budgets, plans),
        *(
            Cell("task", () if plan is None else (_plan_id(plan),), plan, task=task)
            for task in tasks
            for plan in (None, *scored)
        ),
        *_analyses(settings, half, plans),
        *_speed(settings, budgets, plans),
    ]
    return Grid(tuple(cells), budgets, half, tuple(plans))


def depends_on_text(settings: Settings, method: Method) -> bool:
    thresholds = NEEDS_TEXT | {"alloc-t"} if settings.scope == "threshold" else NEEDS_TEXT
    return method in NEEDS_SENSITIVITY | thresholds


def plans_of(plans: Sequence[PlanName], seed: int) -> list[PlanName]:
    """The plans as a seed has them: those that depend on no text are the same for all."""
    of_seed = [plan for plan in plans if plan.seed == seed]
    known = {replace(plan, seed=0) for plan in of_seed}
    return of_seed + [plan for plan in plans if plan.seed == 0 and plan not in known]


def _plan_id(plan: PlanName) -> str:
    return Cell("plan", plan=plan).id


def _profile(plan: PlanName) -> Cell:
    return Cell("profile", text=plan.text, context=plan.context, seed=plan.seed)


def _profiles(plans: Sequence[PlanName]) -> list[Cell]:
    return [*dict.fromkeys(_profile(plan) for plan in plans if plan.method in NEEDS_SENSITIVITY)]


def _needs_of_plan(plan: PlanName) -> tuple[str, ...]:
    return (_profile(plan).id,) if plan.method in NEEDS_SENSITIVITY else ()


def _texts(settings: Settings, budgets: Sequence[int], plans: Sequence[PlanName]) -> list[Cell]:
    return [
        Cell(
            "text",
            tuple(_plan_id(plan) for plan in plans_of(plans, seed) if plan.budget == budget),
            text=text,
            seed=seed,
            budget=budget,
        )
        for seed in range(settings.seeds)
        for text in range(len(settings.measurement.texts))
        for budget in budgets
    ]


def _analyses(settings: Settings, half: int, plans: Sequence[PlanName]) -> list[Cell]:
    found = [PlanName("alloc-moe", half, seed) for seed in range(settings.seeds)]
    return [
        Cell("analysis", (_plan_id(plan),), plan, seed=plan.seed)
        for plan in found
        if plan in plans and settings.measurement.texts
    ]


def _speed(settings: Settings, budgets: Sequence[int], plans: Sequence[PlanName]) -> list[Cell]:
    timed = [PlanName(m, b) for b in budgets for m in settings.timed if PlanName(m, b) in plans]
    return [Cell("speed", tuple(map(_plan_id, timed)))] if timed else []
