"""An experiment with made-up numbers: a `Results` as if every cell, or some of them, had run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from allocmoe.artifacts import (
    Analysis,
    Artifact,
    Benchmark,
    Context,
    Decode,
    Evaluation,
    LayerAnalysis,
    Machine,
    ModelInfo,
    Plan,
    Prefill,
    Quality,
    Score,
    Sensitivity,
    Speed,
    TaskResult,
    TextInfo,
    Timing,
    TokenRule,
)
from allocmoe.codec import encode
from allocmoe.experiment.grid import Cell, Grid, PlanName, make_grid
from allocmoe.experiment.results import Results
from allocmoe.experiment.settings import Settings, load_settings
from allocmoe.solver import ascending, descending, uniform, uniform_mean

# its budgets are 13, 10, 8 and 5 of 16; half is 8
TINY = ModelInfo("tiny/moe", None, "olmoe", (4,) * 4, (8,) * 4, "aa" * 8)
MODEL = "deepseek-v2-lite"
STDERR = 0.01
MADE: dict[str, Any] = dict(versions={"python": "3.11"}, created="2026-01-01T00:00:00+00:00")
TEXT = TextInfo("builtin", "ab" * 32, 4, 64)
# how much a method loses, in units of Uniform
LOSS = {
    "uniform": 1.0,
    "ascending": 1.3,
    "descending": 0.95,
    "lexi": 0.9,
    "naee": 0.85,
    "dynamic-moe": 0.8,
    "alloc-l": 0.75,
    "alloc-t": 0.6,
    "alloc-moe": 0.5,
}


def tiny_settings(*, seeds: int = 2, task_seeds: int = 1, tasks: bool = True) -> Settings:
    """The paper's experiment with two tasks in each group."""
    paper = load_settings("paper")
    groups = {name: group[:2] for name, group in paper.tasks.groups.items()} if tasks else {}
    return replace(paper, seeds=seeds, tasks=replace(paper.tasks, seeds=task_seeds, groups=groups))


def make_results(
    settings: Settings | None = None,
    *,
    info: ModelInfo = TINY,
    keep: Callable[[Cell], bool] = lambda cell: True,
) -> Results:
    """The results of the cells that `keep` says are finished."""
    settings = settings or tiny_settings()
    model = settings.model(MODEL)
    grid = make_grid(settings, model, info, [task.task for task in settings.tasks.all()])
    found = {cell.id: _result(settings, info, grid, cell) for cell in grid.cells if keep(cell)}
    return Results(settings, model, info, grid, found, missing={})


def rise(info: ModelInfo, plan: PlanName, text: int = 0, seed: int = 0) -> float:
    """The rise of the log-perplexity that a plan was given."""
    hard = (sum(info.k_orig) / plan.budget - 1) ** 2
    other = 1 + 0.1 * abs(plan.k_base - 1) + 0.02 * plan.text - 0.03 * plan.context
    return 0.1 * LOSS[plan.method] * hard * other * (1 + 0.2 * text) * (1 + 0.05 * seed)


def score(info: ModelInfo, plan: PlanName | None, task: int) -> float:
    """The share of items that a plan got right in the task at that place of the settings."""
    own = 0.7 - 0.02 * task
    return own if plan is None else own - 0.3 * rise(info, plan, seed=plan.seed)


def speedup(info: ModelInfo, plan: PlanName) -> float:
    """Of the decode; the prefill gains half of it."""
    return 1 + 0.6 * (1 - plan.budget / sum(info.k_orig)) * (0.9 + 0.1 * LOSS[plan.method])


def layer_budgets(info: ModelInfo, plan: PlanName) -> tuple[float, ...]:
    make: dict[str, Callable[..., tuple[float, ...]]] = {
        "uniform": uniform,
        "ascending": ascending,
        "alloc-t": uniform_mean,
        "naee": uniform_mean,
        "dynamic-moe": uniform_mean,
    }
    found = [float(k) for k in make.get(plan.method, descending)(info.k_orig, plan.budget)]
    if plan.seed and plan.method not in make:
        # another text moves a little
        one, other = (plan.seed - 1) % len(found), plan.seed % len(found)
        found[one], found[other] = found[other], found[one]
    return tuple(found)


def _result(settings: Settings, info: ModelInfo, grid: Grid, cell: Cell) -> Any:
    if cell.kind == "task":
        return _task(settings, info, cell)
    makers: dict[str, Callable[[], Artifact]] = {
        "profile": lambda: _profile(info),
        "plan": lambda: _plan(info, cell),
        "text": lambda: _text(info, grid, cell),
        "analysis": lambda: _analysis(info, cell),
        "speed": lambda: _speed(settings, info, grid, cell),
    }
    return makers[cell.kind]().to_json()


def _plans(grid: Grid, cell: Cell) -> list[PlanName]:
    return [plan for plan in grid.plans if Cell("plan", plan=plan).id in cell.needs]


def _profile(info: ModelInfo) -> Sensitivity:
    ks = [tuple(float(k) for k in range(1, own + 1)) for own in info.k_orig]
    return Sensitivity(
        model=info,
        text=TEXT,
        context=Context("paper", tuple(row[-1] for row in ks), (1.0,) * len(ks)),
        token=TokenRule(),
        ks=tuple(ks),
        perplexity=tuple(tuple(10 + 2 / k for k in row) for row in ks),
        base_perplexity=10.0,
        seconds=1.0,
        **MADE,
    )


def _plan(info: ModelInfo, cell: Cell) -> Plan:
    assert cell.plan is not None
    method, split = cell.plan.method, layer_budgets(info, cell.plan)
    token = TokenRule()
    if method in ("alloc-t", "alloc-moe"):
        token = TokenRule("alloc-t", "batch", cell.plan.k_base)
    elif method == "naee" or method == "dynamic-moe":
        token = TokenRule(method, thresholds=(0.5,) * len(split))
    return Plan(
        model=info,
        text=None,
        method=method,
        layer_budgets=split,
        token=token,
        budget_asked=str(cell.plan.budget),
        budget=cell.plan.budget,
        budget_used=sum(split),
        predicted_loss=None,
        normalisation=None,
        context=None,
        **MADE,
    )


def _text(info: ModelInfo, grid: Grid, cell: Cell) -> Evaluation:
    full = tuple(map(float, info.k_orig))
    rows = [_quality("unmodified", "unmodified", 0.0, full)]
    for plan in _plans(grid, cell):
        value = rise(info, plan, cell.text, cell.seed)
        rows.append(_quality(plan.label, plan.method, value, layer_budgets(info, plan)))
    return Evaluation(model=info, text=TEXT, batch_size=2, rows=tuple(rows), **MADE)


def _quality(name: str, method: str, log_rise: float, realised: tuple[float, ...]) -> Quality:
    return Quality(
        name=name,
        method=method,
        token="none",
        budget=sum(realised),
        perplexity=10 + log_rise,
        log_rise=log_rise,
        kl=log_rise,
        top1_agreement=0.9,
        realised=sum(realised),
        realised_per_layer=realised,
        distinct_per_step=(5.0,) * len(realised),
    )


def _task(settings: Settings, info: ModelInfo, cell: Cell) -> Any:
    tasks = settings.tasks.all()
    place = [task.task for task in tasks].index(cell.task)
    value = Score(score(info, cell.plan, place), STDERR, True)
    full = tuple(map(float, info.k_orig))
    realised = full if cell.plan is None else layer_budgets(info, cell.plan)
    result = TaskResult(
        cell.task, 40, 0, {f"{tasks[place].metric},none": value}, sum(realised), realised
    )
    return {"plan": cell.plan.label if cell.plan else "unmodified", **encode(result)}


def _analysis(info: ModelInfo, cell: Cell) -> Analysis:
    assert cell.plan is not None
    split = layer_budgets(info, cell.plan)
    return Analysis(
        model=info,
        text=TEXT,
        name=cell.plan.label,
        method=cell.plan.method,
        budget=cell.plan.budget,
        token="alloc-t/batch",
        layer_budgets=split,
        realised_per_layer=split,
        layers=tuple(
            _layer(number, cell.seed, info.num_experts[number], kept)
            for number, kept in enumerate(split)
        ),
        k_base_sweep=(),
        text_sweep=(),
        **MADE,
    )


def _layer(number: int, seed: int, num_experts: int, kept: float) -> LayerAnalysis:
    before = [1 + ((7 * e + number) % num_experts) / num_experts for e in range(num_experts)]
    after = [load + 0.3 * (e % 3) for e, load in enumerate(before)]
    return LayerAnalysis(
        load_before=tuple(load / sum(before) for load in before),
        load_after=tuple(load / sum(after) for load in after),
        spearman=0.99 - 0.01 * (number % 5) - 0.002 * seed,
        entropy_before=0.95,
        entropy_after=0.94 - 0.004 * (number % 3),
        js_divergence=0.004 + 0.002 * (number % 4),
        entropy_correlation=0.8 - 0.05 * seed,
        kept_by_entropy=tuple((0.5 + 0.2 * b, kept - 0.45 + 0.1 * b, 30.0) for b in range(10)),
    )


def _speed(settings: Settings, info: ModelInfo, grid: Grid, cell: Cell) -> Benchmark:
    rows = [
        _speed_row(settings, info, None),
        *(_speed_row(settings, info, p) for p in _plans(grid, cell)),
    ]
    return Benchmark(
        model=info,
        text=TEXT,
        protocol=settings.speed,
        machine=Machine("A processor", 8, "A GPU", "Linux"),
        command="allocmoe experiment paper",
        dtype="bfloat16",
        random_weights=False,
        fused=True,
        copy_bytes_per_second=4e12,
        prefill_drift=0.0,
        decode_drift=0.0,
        rows=tuple(rows),
        **MADE,
    )


def _speed_row(settings: Settings, info: ModelInfo, plan: PlanName | None) -> Speed:
    decode_gain = 1.0 if plan is None else speedup(info, plan)
    prefill_gain = (1 + decode_gain) / 2
    split = (2.0,) * len(info.k_orig)

    def timing(ms: float) -> Timing:
        return Timing.of((0.98 * ms, ms, 1.02 * ms))

    decode = Decode(
        compiled=True,
        captured=True,
        step=timing(4 / decode_gain),
        speedup=decode_gain,
        tokens_per_second=2000 * decode_gain,
        experts=timing(2 / decode_gain),
        rest_ms=2 / decode_gain,
        realised_per_layer=split,
        distinct_per_step=split,
        floor_bytes=10**9,
        floor_ms=1.0,
        times_floor=4 / decode_gain,
    )
    prefill = Prefill(
        settings.speed.prompt_lengths[0], True, timing(10 / prefill_gain), prefill_gain, split
    )
    name, method, budget = "unmodified", "unmodified", float(sum(info.k_orig))
    if plan is not None:
        name, method, budget = plan.label, plan.method, float(plan.budget)
    return Speed(name, method, "none", budget, "allocmoe", (prefill,), decode)
