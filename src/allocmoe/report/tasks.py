"""Tables of task evaluations, as text: for the page, and for a terminal."""

from __future__ import annotations

from allocmoe.artifacts import TaskEvaluation, TaskResult

LEGEND = (
    "The unmodified model with its standard error, plans with the difference from it; ↓: lower is "
    "better. realised: activations per token over all MoE layers, counted in each task."
)
DETAIL_COLUMNS = (
    "task",
    "items",
    "shots",
    "plan",
    "method",
    "token rule",
    "budget",
    "realised",
    "metric",
    "value",
    "standard error",
    "difference",
)
Rows = list[tuple[str, ...]]


def task_title(evaluation: TaskEvaluation) -> str:
    limit = "" if evaluation.limit is None else f", at most {evaluation.limit} items of each"
    version = evaluation.versions.get("lm-eval", "")
    return f"Tasks of lm-eval {version}".rstrip() + limit


def task_summary(evaluation: TaskEvaluation) -> tuple[tuple[str, ...], Rows]:
    """The main metric of each task: a column a task, a row a plan."""
    base = evaluation.rows[0]
    columns = ("plan", "budget", "realised", *(_heading(result) for result in base.tasks))
    rows = []
    for row in evaluation.rows:
        spent = [result.realised for result in row.tasks]
        low, high = f"{min(spent):.2f}", f"{max(spent):.2f}"
        cells = [
            _with_stderr(result) if row is base else _with_difference(first, result)
            for first, result in zip(base.tasks, row.tasks, strict=True)
        ]
        realised = low if low == high else f"{low}-{high}"
        rows.append((row.name, f"{row.budget:g}", realised, *cells))
    return columns, rows


def task_details(evaluation: TaskEvaluation) -> Rows:
    """Every metric of every task and plan, in DETAIL_COLUMNS."""
    base = evaluation.rows[0]
    return [
        (
            result.task,
            str(result.num_items),
            "mixed" if result.shots is None else str(result.shots),
            row.name,
            row.method,
            row.token,
            f"{row.budget:g}",
            f"{result.realised:.3f}",
            metric,
            _number(score.value),
            _number(score.stderr),
            _difference(first, result, metric),
        )
        for index, first in enumerate(base.tasks)
        for row in evaluation.rows
        for result in (row.tasks[index],)
        for metric, score in result.scores.items()
    ]


def _heading(result: TaskResult) -> str:
    lower = result.scores[result.main].higher_is_better is False
    return f"{result.task} ({result.main}{' ↓' if lower else ''})"


def _with_stderr(result: TaskResult) -> str:
    score = result.scores[result.main]
    stderr = "" if score.stderr is None else f" ±{_number(score.stderr)}"
    return _number(score.value) + stderr


def _with_difference(base: TaskResult, result: TaskResult) -> str:
    score = result.scores.get(base.main)
    if score is None:
        return "-"
    return f"{_number(score.value)} {_difference(base, result, base.main)}".strip()


def _difference(base: TaskResult, result: TaskResult, metric: str) -> str:
    before, after = base.scores.get(metric), result.scores.get(metric)
    if before is None or after is None or before.value is None or after.value is None:
        return ""
    return _number(after.value - before.value, "+")


def _number(value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{sign}z.4f}" if abs(value) < 10 else f"{value:{sign}.5g}"
