"""The paper's tables with our numbers, and the paper's beside them where it prints any.

Figures whose numbers the paper does not print are tables too, so that everything can be read off.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from allocmoe.artifacts import Method
from allocmoe.experiment.grid import PlanName
from allocmoe.experiment.results import Measure, Results, Value, mean_value, minus
from allocmoe.planning.methods import NEEDS_SENSITIVITY

# which methods stand in which of the paper's comparisons
MAIN: tuple[Method, ...] = ("uniform", "lexi", "naee", "dynamic-moe", "alloc-moe")
LAYERS: tuple[Method, ...] = ("uniform", "ascending", "descending", "lexi", "alloc-l")
TOKENS: tuple[Method, ...] = ("uniform", "naee", "dynamic-moe", "alloc-t")
ABLATION: dict[str, Method] = {
    "Uniform": "uniform",
    "+L": "alloc-l",
    "+T": "alloc-t",
    "+L +T": "alloc-moe",
}
COMPARISONS = (
    ("main", "Alloc-MoE against the baselines", MAIN),
    ("alloc-l", "Alloc-L against other splits over layers", LAYERS),
    ("alloc-t", "Alloc-T against other token rules, on uniform layers", TOKENS),
)
NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """A title, what to know, and cells that are text already."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def make_tables(results: Results) -> list[Table]:
    """All of them; cells that are not finished are shown as such."""
    return [
        _setting(results),
        *_comparisons(results),
        *_realised(results),
        *_ablations(results),
        *_sweeps(results),
        *_speed(results),
        *_analysis(results),
        *_per_task(results),
    ]


def show(value: Value | None, digits: int) -> str:
    if value is None:
        return NOTHING
    spread = value.spread
    return f"{value.mean:.{digits}f}" + ("" if spread is None else f" ±{spread:.{digits}f}")


def digits_of(measure: Measure) -> int:
    """Percent of a score, or nats."""
    return 2 if measure.higher_is_better else 4


def _setting(results: Results) -> Table:
    info, settings = results.info, results.settings
    calibration = settings.calibration
    shares = zip(results.model.budgets, results.grid.budgets, strict=True)
    rows = [
        ("model", info.id),
        ("MoE layers", str(len(info.k_orig))),
        ("experts a token", f"{_range(info.k_orig)} of {_range(info.num_experts)}"),
        (
            "budgets",
            ", ".join(
                f"{own} of {sum(info.k_orig)} (the paper: {b} of {results.model.full})"
                for b, own in shares
            ),
        ),
        (
            "calibration",
            f"{calibration.texts[0].name}, {calibration.sequences} x {calibration.length} tokens, "
            f"{settings.seeds} time{'s' if settings.seeds > 1 else ''}",
        ),
        *(
            (
                f"perplexity of the unmodified model, {text.name}",
                show(results.unmodified_perplexity(number), 3),
            )
            for number, text in enumerate(settings.measurement.texts)
        ),
    ]
    return Table("setting", "What was measured", ("", ""), tuple(rows))


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len({*values}) == 1 else f"{min(values)}..{max(values)}"


def _comparisons(results: Results) -> Iterator[Table]:
    for key, title, methods in COMPARISONS:
        for measure in (*results.groups, *results.texts):
            plans: dict[str, list[PlanName]] = {
                method: [PlanName(method, budget) for budget in results.grid.budgets]
                for method in methods
                if method in results.settings.methods
            }
            yield _by_budget(
                results,
                f"{key}-{measure.name}",
                f"{title}: {measure.name} ({_unit(measure)})",
                "method",
                measure,
                plans,
                unmodified=measure.higher_is_better,
            )


def _realised(results: Results) -> Iterator[Table]:
    for key, found, of in (
        ("texts", results.texts, results.realised_on_texts),
        ("tasks", results.groups, results.realised_on_tasks),
    ):
        if found:
            yield Table(
                f"realised-{key}",
                f"Activations a token that really ran, mean of the {key}",
                ("method", *map(str, results.grid.budgets)),
                tuple(
                    (method, *(show(of(PlanName(method, b)), 2) for b in results.grid.budgets))
                    for method in results.settings.methods
                ),
            )


def _unit(measure: Measure) -> str:
    if measure.higher_is_better:
        return "percent, mean of the tasks; higher is better"
    return "rise of the log-perplexity in nats a token; lower is better"


def _by_budget(
    results: Results,
    key: str,
    title: str,
    label: str,
    measure: Measure,
    plans: Mapping[str, Sequence[PlanName]],
    *,
    published: Mapping[str, Sequence[float]] | None = None,
    unmodified: bool = False,
) -> Table:
    """One row a label, one column a budget, and the mean over the budgets; the best in bold."""
    digits = digits_of(measure)
    values = {
        name: [*(measure.of(plan) for plan in row), measure.over(row)]
        for name, row in plans.items()
    }
    best = [
        measure.best(row[place] for row in values.values())
        for place in range(len(results.grid.budgets) + 1)
    ]
    rows = []
    if unmodified:
        own = show(measure.of(None), digits)
        rows.append(("unmodified", *[own] * (len(results.grid.budgets) + 1)))
    for name, row in values.items():
        shown = [show(value, digits) for value in row]
        cells = [
            f"**{cell}**" if value and top and math.isclose(value.mean, top.mean) else cell
            for cell, value, top in zip(shown, row, best, strict=True)
        ]
        rows.append((name, *cells))
    for name, numbers in (published or {}).items():
        cells = [*(f"{number:.2f}" for number in numbers), f"{statistics.fmean(numbers):.2f}"]
        rows.append((f"{name}, the paper's", *cells))
    columns = (label, *(str(budget) for budget in results.grid.budgets), "mean")
    note = "The paper's means are those of its printed numbers." if published else ""
    return Table(re.sub(r"\W+", "-", key).lower(), title, columns, tuple(rows), note)


def _ablations(results: Results) -> Iterator[Table]:
    plans = {
        label: [PlanName(method, budget) for budget in results.grid.budgets]
        for label, method in ABLATION.items()
        if method in results.settings.methods
    }
    for name, measure in _with_parts(results, results.overall):
        yield _by_budget(
            results,
            f"ablation-{name}",
            f"Alloc-L (+L) and Alloc-T (+T): {measure.name} ({_unit(measure)})",
            "method",
            measure,
            plans,
            published=results.model.published.ablation if name == "tasks" else None,
        )


def k_base_plans(results: Results) -> dict[str, list[PlanName]]:
    found: dict[str, list[PlanName]] = {}
    for plan in results.grid.plans:
        if plan.method == "alloc-t" and plan.seed == 0:
            found.setdefault(str(plan.k_base), []).append(plan)
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def calibration_plans(results: Results) -> dict[str, list[PlanName]]:
    found: dict[str, list[PlanName]] = {}
    for plan in results.grid.plans:
        if plan.method == "alloc-l" and plan.seed == 0 and plan.context == 0:
            name = results.settings.calibration.texts[plan.text].name
            found.setdefault(name, []).append(plan)
    return found


def context_plans(results: Results) -> dict[str, list[PlanName]]:
    """What comes of every context; nothing if there is but one."""
    contexts = results.settings.calibration.contexts
    found: dict[str, list[PlanName]] = {}
    for plan in results.grid.plans:
        if plan.method in NEEDS_SENSITIVITY and plan.seed == plan.text == 0:
            found.setdefault(f"{plan.method}, {contexts[plan.context]}", []).append(plan)
    return found if len(contexts) > 1 else {}


def swept(results: Results) -> list[tuple[str, Measure]]:
    """By what the sweeps are measured."""
    named = results.overall
    return [pair for pair in named if pair[0] != "tasks" or results.settings.tasks.sweeps]


def _with_parts(
    results: Results, named: Sequence[tuple[str, Measure]]
) -> Iterator[tuple[str, Measure]]:
    """Measures, and those that they are the means of."""
    parts = {"tasks": results.groups, "perplexity": results.texts}
    for name, measure in named:
        yield name, measure
        if len(parts[name]) > 1:
            yield from ((part.name, part) for part in parts[name])


def _sweeps(results: Results) -> Iterator[Table]:
    published = results.model.published
    contexts = context_plans(results)
    if contexts:
        uniform = [PlanName("uniform", budget) for budget in results.grid.budgets]
        contexts = {"uniform": uniform, **contexts}
    for key, title, label, plans, printed in (
        (
            "k-base",
            "K_base of Alloc-T on uniform layers",
            "K_base",
            k_base_plans(results),
            published.k_base,
        ),
        (
            "calibration",
            "The calibration text of Alloc-L",
            "text",
            calibration_plans(results),
            published.calibration,
        ),
        (
            "context",
            "What the other layers do while one is profiled",
            "method, context",
            contexts,
            {},
        ),
    ):
        for name, measure in _with_parts(results, swept(results)) if plans else ():
            yield _by_budget(
                results,
                f"{key}-{name}",
                f"{title}: {measure.name} ({_unit(measure)})",
                label,
                measure,
                plans,
                published=printed if name == "tasks" else None,
            )


def _speed(results: Results) -> Iterator[Table]:
    benchmark = results.benchmark
    if benchmark is None:
        return
    rows: list[tuple[str, ...]] = []
    for method in results.settings.timed:
        for budget in results.grid.budgets:
            speed = results.speed(PlanName(method, budget))
            if speed is not None:
                rows.append(
                    (
                        method,
                        str(budget),
                        f"{speed.prefill[0].speedup:.3f}",
                        f"{speed.decode.speedup:.3f}",
                        f"{statistics.fmean(speed.decode.realised_per_layer):.2f}",
                        f"{statistics.fmean(speed.decode.distinct_per_step):.2f}",
                    )
                )
    published = results.model.published.speedup
    if published:
        rows.append(
            (
                "alloc-moe, the paper's",
                str(results.grid.half),
                f"{published['prefill']:.2f}",
                f"{published['decode']:.2f}",
                NOTHING,
                NOTHING,
            )
        )
    protocol, machine = benchmark.protocol, benchmark.machine
    yield Table(
        "speed",
        "Times as fast as the unmodified model",
        ("method", "budget", "prefill", "decode", "activations a layer", "distinct experts a step"),
        tuple(rows),
        f"{machine.gpu or machine.processor}, batch {protocol.batch_size}, prompt "
        f"{protocol.prompt_lengths[0]}, {protocol.decode_tokens} tokens decoded, medians of "
        f"{protocol.runs} runs after {protocol.warmups}.",
    )


def _analysis(results: Results) -> Iterator[Table]:
    if not results.analyses:
        return
    first = results.analyses[0]
    rows = []
    for number, budget in enumerate(first.layer_budgets):
        layers = [analysis.layers[number] for analysis in results.analyses]
        known = [x.entropy_correlation for x in layers if x.entropy_correlation is not None]
        rows.append(
            (
                str(number),
                f"{statistics.fmean(a.layer_budgets[number] for a in results.analyses):g}"
                if len(results.analyses) > 1
                else f"{budget:g}",
                f"{statistics.fmean(x.spearman for x in layers):.3f}",
                f"{statistics.fmean(x.entropy_before - x.entropy_after for x in layers):.4f}",
                f"{statistics.fmean(x.js_divergence for x in layers):.4f}",
                f"{statistics.fmean(known):.3f}" if known else NOTHING,
            )
        )
    yield Table(
        "analysis",
        f"Alloc-MoE at {results.grid.half}: the layers, their load, their tokens",
        (
            "MoE layer",
            "budget",
            "rank correlation of the load",
            "fall of its entropy",
            "its JS divergence",
            "experts kept and routing entropy",
        ),
        tuple(rows),
        f"Means of {len(results.analyses)} calibration texts." if len(results.analyses) > 1 else "",
    )


def _per_task(results: Results) -> Iterator[Table]:
    """Every task by itself at half the budget."""
    tasks = [t for t in results.settings.tasks.all() if t.task not in results.missing]
    if not tasks:
        return
    methods = results.settings.methods
    rows = []
    for task in tasks:
        scores = [
            results.score(task, plan)
            for plan in (None, *(PlanName(method, results.grid.half) for method in methods))
        ]
        items = results.num_items(task)
        rows.append(
            (
                task.name,
                task.metric,
                NOTHING if items is None else str(items),
                *(show(score, 2) for score in scores),
            )
        )
    missing = [
        f"{task.name} is missing: {results.missing[task.task]}."
        for task in results.settings.tasks.all()
        if task.task in results.missing
    ]
    yield Table(
        "tasks",
        f"Every task at {results.grid.half}, in percent",
        ("task", "metric", "items", "unmodified", *methods),
        tuple(rows),
        " ".join([*missing, *(f"{note}." for note in results.notes)]),
    )


def gains(results: Results) -> dict[str, Value | None]:
    """Alloc-MoE over Uniform in each group, mean of the budgets."""
    found = {}
    for group in results.groups:
        pairs = [
            (group.of(PlanName("alloc-moe", b)), group.of(PlanName("uniform", b)))
            for b in results.grid.budgets
        ]
        each = [None if a is None or b is None else minus(a, b) for a, b in pairs]
        found[group.name] = mean_value(each, same_items=True)
    return found
