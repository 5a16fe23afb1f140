"""Scores of plans on tasks of lm-evaluation-harness (lm-eval), and what each task made them run.

`load_tasks` and `run_task` know no engine: they take any model that lm-eval calls an `LM`, and two
callbacks for the counting. `TaskRunner` is a model with its engine.
"""

from __future__ import annotations

import difflib
import io
import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from allocmoe.artifacts import (
    LayerActivity,
    Plan,
    Score,
    TaskEvaluation,
    TaskResult,
    TaskRow,
    package_versions,
)
from allocmoe.errors import AllocMoEError, first_line
from allocmoe.evaluation.quality import UNMODIFIED, controlled, name_plans
from allocmoe.models import MoEModel, inspect_model
from allocmoe.progress import Bar, Progress
from allocmoe.runtime.engine import Engine
from allocmoe.runtime.hf import Controller

# lm-eval's tasks, and the group that scores them as one if there is one, by the name to report
Tasks = Mapping[str, Any]

# by score, a 1 or a 0 for every item in their order, where a score is the share of right ones: what
# two plans differ by is known far better from their items than from their shares
Hits = dict[str, str]

# for a standard error without a closed form, such as a perplexity's; lm-eval's own 100000 take half
# a minute for every plan on a task of 5000 items
BOOTSTRAP_DRAWS = 10_000


def load_tasks(
    names: Sequence[str],
    directory: str | Path | None = None,
    *,
    shots: int | None = None,
    answer_tokens: int | None = None,
) -> Tasks:
    """The tasks with their data, ready for `evaluate_tasks`.

    names: of tasks, groups or tags, lm-eval's own or those of the YAML files in `directory`. A
    group that lm-eval scores as one stays one, others are taken apart. shots: examples before each
    question instead of the task's own number; a task written for none stays without.
    answer_tokens: the most that a generated answer may have, if less than the task's own.
    """
    if shots is not None and shots < 0:
        raise AllocMoEError(f"shots must be 0 or more, not {shots}")
    if directory is not None and not Path(directory).is_dir():
        raise AllocMoEError(f"{directory}: no such folder of tasks")
    tasks: dict[str, Any] = {}
    with _quiet():
        manager = _task_manager(names, directory)
        for name in names:
            if name not in manager.all_tasks:
                near = difflib.get_close_matches(name, manager.all_tasks, 3)
                hint = f"; near it: {', '.join(near)}" if near else ""
                raise AllocMoEError(f"there is no task {name!r}{hint}")
            try:
                loaded = manager.load([name])
            except Exception as error:  # whatever data that is not there makes the libraries raise
                raise AllocMoEError(
                    f"the task {name} cannot be loaded: {first_line(error)}"
                ) from error
            for task in loaded["tasks"].values():
                _prepare(task, shots, answer_tokens)
            group = loaded["groups"].get(name)
            if group is not None and group.has_aggregation:
                tasks[name] = loaded
            else:
                tasks |= {n: {"tasks": {n: t}, "groups": {}} for n, t in loaded["tasks"].items()}
    if not tasks:
        raise AllocMoEError("no task is given")
    return tasks


def _task_manager(names: Sequence[str], directory: str | Path | None) -> Any:
    require_lm_eval()
    from lm_eval.tasks.manager import TaskManager

    if directory is not None:
        local = TaskManager(include_path=str(directory), include_defaults=False)
        # the thousands of tasks that come with lm-eval take seconds to read
        known = {*local.all_tasks}
        groups = [local.task_index[name].cfg["task"] for name in local.all_groups]
        members = {member for group in groups for member in group if isinstance(member, str)}
        if {*names} | members <= known:
            return local
    return TaskManager(include_path=None if directory is None else str(directory))


def require_lm_eval() -> None:
    try:
        import lm_eval.tasks.manager  # noqa: F401
    except ImportError:
        raise AllocMoEError(
            "tasks need lm-eval 0.4.12 or newer: pip install 'allocmoe[tasks]'"
        ) from None


def _prepare(task: Any, shots: int | None, answer_tokens: int | None) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise AllocMoEError(
            f"the task {task.task_name} runs code that the model writes, which allocmoe does not"
        )
    own = task.get_config("num_fewshot")
    if own is None or (shots is not None and own != 0):
        task.set_config(key="num_fewshot", value=shots or 0)
    settings = task.get_config("generation_kwargs")
    if answer_tokens is not None and settings is not None:
        most = min(answer_tokens, settings.get("max_gen_toks", answer_tokens))
        task.set_config(key="generation_kwargs", value={**settings, "max_gen_toks": most})


def run_task(
    lm: Any,
    name: str,
    tasks: Tasks,
    *,
    reset: Callable[[], None],
    activity: Callable[[], Sequence[LayerActivity]],
    limit: int | None = None,
    note: Callable[[str], None] = lambda line: None,
    on_hits: Callable[[Hits], None] = lambda hits: None,
) -> TaskResult:
    """One of the loaded tasks on an `LM` of lm-eval, by whatever engine it runs.

    `reset` is called before the first request, and `activity` after the last one tells what ran.
    `on_hits` hears which items were right.
    """
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.evaluator import evaluate

    task = tasks[name]
    # lm-eval's own seeds: examples and samples are the same for every plan, and as it draws them
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    for part in task["tasks"].values():
        part.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    reset()
    try:
        with _quiet() as log:
            found = evaluate(
                lm=lm,
                task_dict=task,
                limit=limit,
                bootstrap_iters=BOOTSTRAP_DRAWS,
                log_samples=True,
            )
    except (AssertionError, ValueError) as error:
        raise AllocMoEError(f"the task {name} cannot be run: {first_line(error)}") from error
    if any("truncat" in line.lower() for line in log):
        note(f"{name}: inputs that are longer than the model takes lose their beginning")
    layers = [layer.mean for layer in activity()]
    shots = {found["n-shot"][part] for part in task["tasks"]}
    scores = _read_scores(found["results"][name], task["tasks"].values())
    num_items = sum(found["n-samples"][part]["effective"] for part in task["tasks"])
    samples = [sample for part in task["tasks"] for sample in found["samples"][part]]
    on_hits(_read_hits(samples, num_items, scores))
    return TaskResult(
        task=name,
        num_items=num_items,
        shots=shots.pop() if len(shots) == 1 else None,
        scores=scores,
        realised=sum(layers),
        realised_per_layer=tuple(layers),
    )


def _read_scores(found: Mapping[str, Any], parts: Iterable[Any]) -> dict[str, Score]:
    """From lm-eval's flat `metric,filter` and `metric_stderr,filter`."""
    better = {metric: up for part in parts for metric, up in part.higher_is_better().items()}
    scores = {}
    for key, value in found.items():
        metric, comma, answer_filter = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            scores[metric if answer_filter == "none" else key] = Score(
                value=_finite(value),
                stderr=_finite(found.get(f"{metric}_stderr,{answer_filter}")),
                higher_is_better=better.get(metric),
            )
    return scores


def _read_hits(
    samples: Sequence[Mapping[str, Any]], num_items: int, scores: Mapping[str, Score]
) -> Hits:
    """From what lm-eval keeps of every item."""
    found = {}
    for key, score in scores.items():
        metric, _, answer_filter = key.partition(",")
        values = [
            sample.get(metric)
            for sample in samples
            if sample["filter"] == (answer_filter or "none")
        ]
        if score.value is None or not all(value in (0, 1) for value in values):
            continue
        hits = "".join("1" if value else "0" for value in values)
        # a group may weigh its tasks in another way
        if len(hits) == num_items and math.isclose(hits.count("1") / num_items, score.value):
            found[key] = hits
    return found


def _finite(value: Any) -> float | None:
    number = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if number else None


class TaskRunner:
    """A model as lm-eval sees it, for tasks and plans one by one.

    model: a transformers model, or an engine that runs one (`VllmEngine`), which makes its own
      batches.
    """

    def __init__(self, model: nn.Module | Engine, tokenizer: Any, *, batch_size: int = 8) -> None:
        if batch_size < 1:
            raise AllocMoEError(f"batch_size must be 1 or more, not {batch_size}")
        self.moe = inspect_model(model) if isinstance(model, nn.Module) else model.moe
        self._model = model
        require_lm_eval()
        self._lm: Any
        if isinstance(model, nn.Module):
            from allocmoe.evaluation.tasks_hf import MaskedHFLM

            with _quiet():
                self._lm = MaskedHFLM(self.moe.model, tokenizer, batch_size)
        else:
            from allocmoe.evaluation.tasks_engine import EngineLM

            self._lm = EngineLM(model, tokenizer)

    def run(
        self,
        name: str,
        tasks: Tasks,
        plan: Plan | None,
        *,
        limit: int | None = None,
        on_share: Callable[[float], None] = lambda share: None,
        note: Callable[[str], None] = lambda line: None,
        on_hits: Callable[[Hits], None] = lambda hits: None,
    ) -> TaskResult:
        """One of the loaded tasks under a plan, or without any.

        on_share hears what share of the task has just been run, on_hits which items were right.
        """
        if limit is not None and limit < 1:
            raise AllocMoEError(f"limit must be 1 or more, not {limit}")
        self._lm.on_share = on_share
        with _counted(self._model, plan) as controller:
            return run_task(
                self._lm,
                name,
                tasks,
                reset=controller.reset,
                activity=controller.activity,
                limit=limit,
                note=note,
                on_hits=on_hits,
            )


def evaluate_tasks(
    model: nn.Module | Engine,
    tokenizer: Any,
    plans: Mapping[str, Plan],
    tasks: Tasks | Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> TaskEvaluation:
    """The scores of every plan on every task, with the unmodified model as the first row.

    model: a transformers model, or an engine that runs one (`VllmEngine`), which makes its own
      batches. tasks: names of lm-eval's tasks, or what `load_tasks` gives. limit: items of each.
    """
    runner = TaskRunner(model, tokenizer, batch_size=batch_size)
    named = name_plans(runner.moe, plans)
    loaded = tasks if isinstance(tasks, Mapping) else load_tasks(tasks)
    progress = progress or Progress()
    rows = []
    with progress.bar("tasks", len(named) * len(loaded)) as bar:
        for name, plan in named:
            results = []
            for task in loaded:
                share = _Share(bar, f"{task}, {name}")
                # the same for all plans
                note = progress.note if plan is None else lambda line: None
                results.append(
                    runner.run(task, loaded, plan, limit=limit, on_share=share.advance, note=note)
                )
                share.advance(1.0)
            rows.append(_row(runner.moe, name, plan, results))
    return TaskEvaluation(
        model=runner.moe.info,
        text=None,
        versions={**package_versions(), "lm-eval": metadata.version("lm-eval")},
        batch_size=batch_size,
        limit=limit,
        rows=tuple(rows),
    )


@contextmanager
def _counted(model: nn.Module | Engine, plan: Plan | None) -> Iterator[Controller | Engine]:
    """The plan at work, and who counts."""
    if isinstance(model, nn.Module):
        with controlled(inspect_model(model), plan) as controller:
            yield controller
    else:
        model.follow(plan)
        yield model
        model.follow(None)


def _row(moe: MoEModel, name: str, plan: Plan | None, results: Sequence[TaskResult]) -> TaskRow:
    return TaskRow(
        name=name,
        method=UNMODIFIED if plan is None else plan.method,
        token="none" if plan is None else plan.token.label,
        budget=float(sum(moe.k_orig)) if plan is None else float(plan.budget),
        tasks=tuple(results),
    )


class _Share:
    """Moves a bar through one task, which counts as 1 however often it is told more."""

    def __init__(self, bar: Bar, note: str) -> None:
        self._bar, self._note, self._left = bar, note, 1.0

    def advance(self, share: float) -> None:
        share = min(share, self._left)
        self._left -= share
        self._bar.advance(share, self._note)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Keeps lm-eval's bars and prints from the user; what it logs is handed over instead."""
    from tqdm import tqdm

    log, handler, draw = logging.getLogger("lm_eval"), _Lines(), tqdm.__init__
    with ExitStack() as after, redirect_stdout(io.StringIO()):
        after.callback(setattr, log, "propagate", log.propagate)
        log.propagate = False
        after.callback(log.removeHandler, handler)
        log.addHandler(handler)
        after.callback(setattr, tqdm, "__init__", draw)
        # lm-eval asks for some of its bars outright, past every setting
        tqdm.__init__ = lambda bar, *args, **keys: draw(bar, *args, **keys | {"disable": True})
        if "DISABLE_MULTIPROC" not in os.environ:
            # processes that are forked for a bootstrap inherit our handlers of signals
            after.callback(os.environ.pop, "DISABLE_MULTIPROC")
            os.environ["DISABLE_MULTIPROC"] = "1"
        yield handler.lines
