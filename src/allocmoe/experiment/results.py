"""The numbers of an experiment: what each plan scored, and how sure one can be of a difference.

A measure is one number of every plan: the mean score on a group of tasks, or the rise of the
log-perplexity on a text. Scores come with the standard error that their items leave; rises come
once for every seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from allocmoe.artifacts import (
    Analysis,
    Benchmark,
    Evaluation,
    ModelInfo,
    Plan,
    Quality,
    Score,
    Speed,
)
from allocmoe.codec import decode
from allocmoe.evaluation.quality import UNMODIFIED
from allocmoe.experiment.grid import Cell, Grid, PlanName
from allocmoe.experiment.settings import ModelSettings, Settings, TaskSettings

# of Student's distribution, two-sided 95 %, by degrees of freedom; beyond them the normal one's
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.96


@dataclass(frozen=True)
class Value:
    """A measured number. samples: one a seed. stderr: what the choice of items leaves open.

    items: what every item adds to it, by task, as far as that is known: the number is the sum of
    the tasks' means.
    """

    samples: tuple[float, ...]
    stderr: float | None = None
    items: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds, or of one number its standard error."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else self.stderr


@dataclass(frozen=True)
class Difference:
    """How much better one is than another. noise: below it, nothing is known; None if unknown."""

    better_by: float
    noise: float | None

    @property
    def verdict(self) -> str:
        if self.noise is not None and abs(self.better_by) <= self.noise:
            return "within noise"
        return "ahead" if self.better_by > 0 else "behind"


@dataclass(frozen=True)
class Measure:
    """One number of every plan. `of` is None for a plan that was not measured, or not wholly."""

    name: str
    higher_is_better: bool
    of: Callable[[PlanName | None], Value | None]

    def compare(self, one: Value, other: Value) -> Difference:
        sign = 1.0 if self.higher_is_better else -1.0
        return Difference(sign * (one.mean - other.mean), _noise(one, other))

    def best(self, values: Iterable[Value | None]) -> Value | None:
        known = (value for value in values if value is not None)
        pick = max if self.higher_is_better else min
        return pick(known, key=lambda value: value.mean, default=None)

    def over(self, plans: Sequence[PlanName]) -> Value | None:
        """The mean over several plans, all measured on the same items."""
        return mean_value([self.of(plan) for plan in plans], same_items=True)


def mean_value(values: Sequence[Value | None], *, same_items: bool = False) -> Value | None:
    """The mean of several values; None if one is missing.

    same_items: their standard errors come of the same items, and do not average out.
    """
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    rows = _by_seed(known)
    errors = [value.stderr for value in known if value.stderr is not None]
    stderr = None
    if len(errors) == len(known):
        stderr = statistics.fmean(errors) if same_items else math.hypot(*errors) / len(errors)
    items: dict[str, np.ndarray] = {}
    if all(value.items for value in known):
        for value in known:
            for task, found in value.items.items():
                items[task] = items.get(task, 0.0) + found / len(known)
    return Value(tuple(map(statistics.fmean, zip(*rows, strict=True))), stderr, items)


def minus(one: Value, other: Value) -> Value:
    """The difference, seed by seed and item by item."""
    samples = tuple(a - b for a, b in zip(*_by_seed([one, other]), strict=True))
    stderr = None
    if one.stderr is not None and other.stderr is not None:
        stderr = math.hypot(one.stderr, other.stderr)
    items = {}
    if one.items and other.items:
        items = {task: one.items[task] - found for task, found in other.items.items()}
    return Value(samples, stderr, items)


def _by_seed(values: Sequence[Value]) -> list[tuple[float, ...]]:
    """Their samples; what no seed changes counts for every seed."""
    num_seeds = max(len(value.samples) for value in values)
    return [v.samples if len(v.samples) == num_seeds else v.samples * num_seeds for v in values]


def _noise(one: Value, other: Value) -> float | None:
    """The half width of a 95 % interval around the difference; None where nothing is known."""
    parts = []
    num_seeds = len(one.samples)
    if num_seeds == len(other.samples) > 1:
        gaps = [a - b for a, b in zip(one.samples, other.samples, strict=True)]
        factor = _STUDENT[num_seeds - 2] if num_seeds - 2 < len(_STUDENT) else _NORMAL
        parts.append(factor * statistics.stdev(gaps) / math.sqrt(num_seeds))
    if one.items and other.items:
        # a task that only one of them has counts by itself
        each = [
            one.items.get(task, np.zeros(1)) - other.items.get(task, np.zeros(1))
            for task in {**one.items, **other.items}
        ]
        parts.append(_NORMAL * math.sqrt(sum(float(gaps.var()) / len(gaps) for gaps in each)))
    elif one.stderr is not None and other.stderr is not None:
        # as if the items were others: wider than it need be
        parts.append(_NORMAL * math.hypot(one.stderr, other.stderr))
    return math.hypot(*parts) if parts else None


@dataclass(frozen=True)
class Results:
    """What is finished of an experiment. found: the results of its cells by their ids."""

    settings: Settings
    model: ModelSettings
    info: ModelInfo
    grid: Grid
    found: Mapping[str, Any]
    # tasks of the settings that could not be had, and why
    missing: Mapping[str, str]
    # what a reader has to know about the tasks that were
    notes: Sequence[str] = ()

    @cached_property
    def groups(self) -> list[Measure]:
        """One measure for each group of tasks that has any, in percent."""
        return [
            Measure(name, True, lambda plan, tasks=tasks: self._group(tasks, plan))  # type: ignore[misc]
            for name, group in self.settings.tasks.groups.items()
            if (tasks := [task for task in group if task.task not in self.missing])
        ]

    @cached_property
    def tasks(self) -> Measure | None:
        """The mean over the groups."""
        if not self.groups:
            return None
        return Measure(
            "mean of the groups",
            True,
            lambda plan: mean_value([group.of(plan) for group in self.groups]),
        )

    @cached_property
    def texts(self) -> list[Measure]:
        """One measure for each text: the rise of the log-perplexity."""
        return [
            Measure(text.name, False, lambda plan, number=number: self._rise(number, plan))  # type: ignore[misc]
            for number, text in enumerate(self.settings.measurement.texts)
        ]

    @cached_property
    def text(self) -> Measure | None:
        """The mean over the texts."""
        if not self.texts:
            return None
        return Measure(
            "mean of the texts",
            False,
            lambda plan: mean_value([text.of(plan) for text in self.texts]),
        )

    @property
    def overall(self) -> list[tuple[str, Measure]]:
        """What claims are judged by."""
        named = [("tasks", self.tasks), ("perplexity", self.text)]
        return [(name, measure) for name, measure in named if measure is not None]

    def score(self, task: TaskSettings, plan: PlanName | None) -> Value | None:
        """In percent. A plan that depends on no text has the same score for every seed."""
        names = [plan] if plan is None else self._by_seed(plan)
        values = []
        for name in names:
            found = self.found.get(Cell("task", plan=name, task=task.task).id)
            value = None if found is None else _main_score(found, task)
            if value is None:
                return None
            values.append(value)
        items = {}
        if all(value.items for value in values):
            items[task.task] = np.mean([value.items[task.task] for value in values], axis=0)
        return Value(tuple(value.mean for value in values), values[0].stderr, items)

    def num_items(self, task: TaskSettings) -> int | None:
        found = self.found.get(Cell("task", plan=None, task=task.task).id)
        return None if found is None else int(found["num_items"])

    def _group(self, tasks: Sequence[TaskSettings], plan: PlanName | None) -> Value | None:
        return mean_value([self.score(task, plan) for task in tasks])

    def _rise(self, text: int, plan: PlanName | None) -> Value | None:
        if plan is None:
            return Value((0.0,) * self.settings.seeds)
        rows = self._rows(text, plan)
        return None if rows is None else Value(tuple(row.log_rise for row in rows))

    def _rows(self, text: int, plan: PlanName) -> list[Quality] | None:
        """What a plan measured on a text, for every seed."""
        rows = []
        for seed in range(self.settings.seeds):
            found = self._evaluations.get((text, seed, plan.budget), {})
            # a plan that depends on no text is the one of seed 0
            names = [replace(plan, seed=seed).label, replace(plan, seed=0).label]
            row = next((found[name] for name in names if name in found), None)
            if row is None:
                return None
            rows.append(row)
        return rows

    @cached_property
    def _evaluations(self) -> dict[tuple[int, int, int], dict[str, Quality]]:
        """By text, seed and budget, then by plan."""
        found = {}
        for cell in self.grid.cells:
            if cell.kind == "text" and cell.id in self.found:
                rows = Evaluation.from_json(self.found[cell.id], cell.id).rows
                found[cell.text, cell.seed, cell.budget] = {row.name: row for row in rows}
        return found

    def realised_on_texts(self, plan: PlanName) -> Value | None:
        """The activations a token over all layers that a plan really ran."""
        values = []
        for text in range(len(self.texts)):
            rows = self._rows(text, plan)
            values.append(None if rows is None else Value(tuple(row.realised for row in rows)))
        return mean_value(values)

    def realised_on_tasks(self, plan: PlanName) -> Value | None:
        names = [task.task for task in self.settings.tasks.all() if task.task not in self.missing]
        found = [self.found.get(Cell("task", plan=plan, task=name).id) for name in names]
        return mean_value([None if f is None else Value((float(f["realised"]),)) for f in found])

    def unmodified_perplexity(self, text: int) -> Value | None:
        """By whatever budget is finished, for all of them measure it."""
        known = {
            seed: rows[UNMODIFIED].perplexity
            for (number, seed, _), rows in self._evaluations.items()
            if number == text
        }
        return Value(tuple(known.values())) if len(known) == self.settings.seeds else None

    def _by_seed(self, plan: PlanName) -> list[PlanName]:
        """The plan under every seed of the tasks, or alone if it is the same under all."""
        same = [replace(plan, seed=seed) for seed in range(self.settings.tasks.seeds)]
        return [name for name in same if name in self.grid.plans] or [plan]

    def plan(self, name: PlanName) -> Plan | None:
        cell = Cell("plan", plan=name)
        found = self.found.get(cell.id)
        return None if found is None else Plan.from_json(found, cell.id)

    @cached_property
    def analyses(self) -> list[Analysis]:
        """Of Alloc-MoE at half the budget, one for each of `analysed_seeds`."""
        cells = [Cell("analysis", seed=seed) for seed in self.analysed_seeds]
        return [Analysis.from_json(self.found[cell.id], cell.id) for cell in cells]

    @property
    def analysed_seeds(self) -> list[int]:
        return [c.seed for c in self.grid.cells if c.kind == "analysis" and c.id in self.found]

    @cached_property
    def benchmark(self) -> Benchmark | None:
        found = self.found.get(Cell("speed").id)
        return None if found is None else Benchmark.from_json(found, Cell("speed").id)

    def speed(self, plan: PlanName) -> Speed | None:
        rows = () if self.benchmark is None else self.benchmark.rows
        return next((row for row in rows if row.name == plan.label), None)


def _main_score(found: Any, task: TaskSettings) -> Value | None:
    """The task's metric in percent, itself or under whatever filter is listed first."""
    names = [name for name in found["scores"] if name.partition(",")[0] == task.metric]
    if not names:
        return None
    score = decode(Score, found["scores"][names[0]], names[0])
    if score.value is None:
        return None
    hits = found.get("hits", {}).get(names[0])
    return Value(
        (100 * score.value,),
        None if score.stderr is None else 100 * score.stderr,
        {task.task: 100.0 * (np.frombuffer(hits.encode(), np.uint8) - ord("0"))} if hits else {},
    )
