"""Tasks of lm-eval under plans: its own scores, whatever the batch, and what each task ran."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.dummy import DummyLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import manager as lm_eval_manager
from lm_eval.tasks.manager import TaskManager

import allocmoe
from allocmoe.artifacts import LayerActivity, Plan, Score, TaskEvaluation, TaskResult
from allocmoe.errors import AllocMoEError
from allocmoe.evaluation import tasks as tasks_module
from allocmoe.evaluation.tasks import BOOTSTRAP_DRAWS, Tasks, run_task
from allocmoe.evaluation.tasks_hf import MaskedHFLM
from allocmoe.models.load import load_model, load_tokenizer
from allocmoe.progress import Progress
from task_files import CHOICES, LAST_WORDS, NAMES, QUESTIONS, write_task, write_tasks
from tiny import tiny

Bundled = tuple[Any, Any]


@pytest.fixture(scope="module")
def bundled() -> Bundled:
    return load_model("reference", dtype="float32"), load_tokenizer("reference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def tasks(folder: Path) -> Tasks:
    return allocmoe.load_tasks(NAMES, folder)


@pytest.fixture(scope="module")
def plans(bundled: Bundled) -> dict[str, Plan]:
    model, tokenizer = bundled
    text = allocmoe.load_text("builtin", tokenizer, sequences=4, length=64)
    make = allocmoe.make_plan
    return {
        "uniform": make("uniform", "50%", model=model),
        "sequence": make("alloc-t", "50%", model=model, scope="sequence"),
        "threshold": make("alloc-t", "50%", model=model, text=text, scope="threshold"),
    }


@pytest.fixture(scope="module")
def evaluated(bundled: Bundled, plans: dict[str, Plan], tasks: Tasks) -> dict[int, TaskEvaluation]:
    """By batch size."""
    return {n: allocmoe.evaluate_tasks(*bundled, plans, tasks, batch_size=n) for n in (1, 4)}


def by_task(results: Sequence[TaskResult]) -> dict[str, TaskResult]:
    return {result.task: result for result in results}


def values(result: TaskResult) -> dict[str, float | None]:
    return {name: score.value for name, score in result.scores.items()}


def lm_eval_itself(
    bundled: Bundled, folder: Path, names: Sequence[str], **options: Any
) -> dict[str, dict[str, Score]]:
    """The same tasks by lm-eval's own model class and its own front door."""
    model, tokenizer = bundled
    found = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.pop("batch_size", 1)),
        tasks=list(names),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=BOOTSTRAP_DRAWS,
        **options,
    )
    scores: dict[str, dict[str, Score]] = {}
    for task, numbers in found["results"].items():
        for key, value in numbers.items():
            if key.endswith(",none") and "_stderr" not in key:
                metric = key.removesuffix(",none")
                stderr = numbers[f"{metric}_stderr,none"]
                up = found["higher_is_better"][task][metric]
                scores.setdefault(task, {})[metric] = Score(value, stderr, up)
    return scores


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")


class TestScores:
    def test_are_those_of_lm_eval(
        self, bundled: Bundled, folder: Path, evaluated: dict[int, TaskEvaluation]
    ) -> None:
        own = lm_eval_itself(bundled, folder, NAMES)
        ours = by_task(evaluated[1].rows[0].tasks)
        assert {name: result.scores for name, result in ours.items()} == own
        assert set(ours["choices"].scores) == {"acc", "acc_norm"}
        assert ours["last_word"].scores["perplexity"].higher_is_better is False
        assert ours["last_word"].scores["perplexity"].stderr is not None
        assert ours["last_word"].main == "acc"

    def test_are_those_of_lm_eval_in_padded_batches(
        self, bundled: Bundled, folder: Path, evaluated: dict[int, TaskEvaluation]
    ) -> None:
        own = lm_eval_itself(bundled, folder, NAMES, batch_size=4)
        for result in evaluated[4].rows[0].tasks:
            expected = {name: score.value for name, score in own[result.task].items()}
            assert values(result) == pytest.approx(expected, rel=1e-5)

    def test_with_examples_are_those_of_lm_eval(self, bundled: Bundled, folder: Path) -> None:
        names = ["choices", "last_word"]
        own = lm_eval_itself(bundled, folder, names, num_fewshot=2, limit=3)
        tasks = allocmoe.load_tasks(names, folder, shots=2)
        for _ in range(2):  # the tasks can be used again, with the same examples
            row = allocmoe.evaluate_tasks(*bundled, {}, tasks, limit=3, batch_size=1).rows[0]
            assert {result.task: result.scores for result in row.tasks} == own
            assert {(result.num_items, result.shots) for result in row.tasks} == {(3, 2)}

    def test_do_not_depend_on_the_batch(self, evaluated: dict[int, TaskEvaluation]) -> None:
        for one, four in zip(evaluated[1].rows, evaluated[4].rows, strict=True):
            for alone, padded in zip(one.tasks, four.tasks, strict=True):
                assert values(padded) == pytest.approx(values(alone), rel=1e-4)
                # in a batch, an answer that has ended goes on until all have
                if alone.task != "answers":
                    expected = pytest.approx(alone.realised_per_layer, rel=1e-3)
                    assert padded.realised_per_layer == expected

    def test_would_depend_on_the_batch_without_masks(
        self, bundled: Bundled, plans: dict[str, Plan], tasks: Tasks
    ) -> None:
        """What `MaskedHFLM` is for."""
        model, tokenizer = bundled
        perplexities = []
        for batch_size in (1, 4):
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            with allocmoe.apply(model, plans["sequence"]) as applied:
                result = run_on(lm, tasks, "last_word", applied)
            perplexities.append(values(result)["perplexity"])
        assert perplexities[1] != pytest.approx(perplexities[0], rel=1e-2)

    def test_a_plan_changes_them(self, evaluated: dict[int, TaskEvaluation]) -> None:
        perplexity = [
            values(by_task(row.tasks)["last_word"])["perplexity"] for row in evaluated[1].rows
        ]
        assert len({*perplexity}) == len(perplexity)


def run_on(lm: Any, tasks: Tasks, name: str, applied: Any) -> TaskResult:
    return run_task(lm, name, tasks, reset=applied.reset, activity=applied.activity)


class TestRealised:
    def test_rows_say_what_they_are(
        self, evaluated: dict[int, TaskEvaluation], plans: dict[str, Plan]
    ) -> None:
        result = evaluated[4]
        assert result.batch_size == 4
        assert result.limit is None
        assert result.text is None
        assert result.versions["lm-eval"]
        assert [row.name for row in result.rows] == ["unmodified", *plans]
        assert [row.budget for row in result.rows] == [48, 24, 24, 24]
        assert [row.token for row in result.rows] == [
            "none",
            "none",
            "alloc-t/sequence",
            "alloc-t/threshold",
        ]
        counts = [len(CHOICES), len(LAST_WORDS), len(QUESTIONS)]
        for row in result.rows:
            assert [task.num_items for task in row.tasks] == counts
            assert [task.shots for task in row.tasks] == [0, 0, 0]

    def test_counts_what_the_plan_runs(self, evaluated: dict[int, TaskEvaluation]) -> None:
        unmodified, uniform, sequence, threshold = evaluated[4].rows
        for task in unmodified.tasks:
            assert task.realised_per_layer == (6.0,) * 8
        for task in uniform.tasks:
            assert task.realised_per_layer == (3.0,) * 8
        for task in sequence.tasks:
            assert task.realised == pytest.approx(24, rel=0.02)  # pairs are whole, sequences short
        spent = [task.realised for task in threshold.tasks]
        assert len({*spent}) == len(spent)
        for task in threshold.tasks:
            assert task.realised == pytest.approx(sum(task.realised_per_layer))

    def test_each_task_is_counted_alone(
        self,
        bundled: Bundled,
        folder: Path,
        plans: dict[str, Plan],
        evaluated: dict[int, TaskEvaluation],
    ) -> None:
        plan = {"threshold": plans["threshold"]}
        alone = allocmoe.evaluate_tasks(
            *bundled, plan, allocmoe.load_tasks(["last_word"], folder), batch_size=4
        )
        together = by_task(evaluated[4].rows[-1].tasks)
        assert alone.rows[1].tasks == (together["last_word"],)

    @pytest.mark.parametrize("name", NAMES)
    def test_padding_takes_no_activation(
        self, bundled: Bundled, plans: dict[str, Plan], tasks: Tasks, name: str
    ) -> None:
        model, tokenizer = bundled
        seen: list[list[LayerActivity]] = []
        for batch_size in (1, 4):
            lm = MaskedHFLM(model, tokenizer, batch_size)
            with allocmoe.apply(model, plans["threshold"]) as applied:
                run_on(lm, tasks, name, applied)
                seen.append(applied.activity())
        for alone, padded in zip(*seen, strict=True):
            assert padded.padding_activations == 0
            assert padded.forwards < alone.forwards
            if name != "answers":
                assert padded.tokens == alone.tokens

    def test_tokens_are_those_of_the_inputs(
        self, bundled: Bundled, plans: dict[str, Plan], tasks: Tasks
    ) -> None:
        """Token 0 at the end of an input is a token."""
        model, tokenizer = bundled
        inputs = set()
        for question, choices, _ in CHOICES:
            for choice in choices:
                inputs.add(tuple(tokenizer(question + choice).input_ids[:-1]))
        assert any(ids[-1] == 0 for ids in inputs)
        with allocmoe.apply(model, plans["uniform"]) as applied:
            run_on(MaskedHFLM(model, tokenizer, 4), tasks, "choices", applied)
            assert applied.activity()[0].tokens == sum(map(len, inputs))


def test_leaves_model_and_tokenizer_as_they_were(bundled: Bundled, tasks: Tasks) -> None:
    tokenizer = copy.deepcopy(bundled[1])
    tokenizer.pad_token = None
    model = tiny("olmoe", vocab_size=len(tokenizer))
    plan = allocmoe.make_plan("alloc-t", "50%", model=model)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        allocmoe.evaluate_tasks(model, tokenizer, {"half": plan}, tasks)
        assert torch.equal(model(ids).logits, before)
    assert tokenizer.pad_token is None


class Recorder(Progress):
    def __init__(self) -> None:
        self.total = 0.0
        self.steps: list[tuple[float, str]] = []
        self.notes: list[str] = []

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Recorder]:
        self.total = total
        yield self

    def advance(self, work: float, note: str = "") -> None:
        self.steps.append((work, note))

    def note(self, line: str) -> None:
        self.notes.append(line)


def test_tells_how_far_it_is_and_what_was_cut(
    folder: Path, bundled: Bundled, capfd: pytest.CaptureFixture[str]
) -> None:
    """All on the progress: lm-eval itself prints nothing, and its logger is as before."""
    tokenizer = bundled[1]
    model = tiny("olmoe", vocab_size=len(tokenizer), max_position_embeddings=20)
    plan = allocmoe.make_plan("uniform", "50%", model=model)
    progress, log = Recorder(), logging.getLogger("lm_eval")
    before = log.propagate, list(log.handlers), os.environ.get("DISABLE_MULTIPROC")
    allocmoe.evaluate_tasks(
        model,
        tokenizer,
        {"half": plan},
        allocmoe.load_tasks(["choices", "last_word"], folder),
        batch_size=2,
        progress=progress,
    )
    assert sum(work for work, _ in progress.steps) == pytest.approx(progress.total) == 4
    assert progress.notes == [
        "last_word: inputs that are longer than the model takes lose their beginning"
    ]
    told = [note for _, note in progress.steps]
    assert told.count("last_word, half") == len(LAST_WORDS) // 2 + 1
    assert before == (log.propagate, list(log.handlers), os.environ.get("DISABLE_MULTIPROC"))
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_any_model_of_lm_eval_can_be_run(tasks: Tasks) -> None:
    """The seam for other engines: an `LM` and two callbacks."""
    calls: list[str] = []
    layer = LayerActivity(10, 25, 0, 1, 1, 1, 1)

    class Counting(DummyLM):  # type: ignore[misc]
        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            calls.append("run")
            return super().loglikelihood(requests, disable_tqdm)

    def activity() -> list[LayerActivity]:
        calls.append("activity")
        return [layer, layer]

    hits: dict[str, str] = {}
    result = run_task(
        Counting(),
        "choices",
        tasks,
        reset=lambda: calls.append("reset"),
        activity=activity,
        on_hits=hits.update,
    )
    assert calls == ["reset", "run", "activity"]
    for name, right in hits.items():
        assert len(right) == result.num_items
        assert right.count("1") / len(right) == pytest.approx(result.scores[name].value)
    assert "acc" in hits
    assert result.realised_per_layer == (2.5, 2.5)
    assert result.realised == 5.0


class TestLoading:
    @pytest.fixture
    def local_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the thousands of tasks that come with lm-eval, which take seconds to read."""

        class Local(TaskManager):  # type: ignore[misc]
            def __init__(self, include_path: Any = None, include_defaults: bool = False) -> None:
                super().__init__(include_path=include_path, include_defaults=False)

        monkeypatch.setattr(lm_eval_manager, "TaskManager", Local)

    @pytest.mark.usefixtures("local_only")
    def test_a_group_that_is_scored_as_one_stays_one(
        self, bundled: Bundled, tmp_path: Path
    ) -> None:
        write_tasks(tmp_path)
        write_task(tmp_path, "choices", "more", "num_fewshot: 1\ntag: tagged")
        write_task(tmp_path, "choices", "others", "tag: tagged")
        metrics = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]"
        members = "task: [choices, more]"
        (tmp_path / "one.yaml").write_text(f"group: one\n{members}\n{metrics}\n")
        (tmp_path / "many.yaml").write_text(f"group: many\n{members}\n")
        assert list(allocmoe.load_tasks(["many"], tmp_path)) == ["choices", "more"]
        assert list(allocmoe.load_tasks(["tagged"], tmp_path)) == ["more", "others"]
        tasks = allocmoe.load_tasks(["one", "last_word"], tmp_path)
        assert list(tasks) == ["one", "last_word"]
        group = allocmoe.evaluate_tasks(*bundled, {}, tasks).rows[0].tasks[0]
        assert (group.task, group.num_items, group.shots) == ("one", 2 * len(CHOICES), None)
        assert group.scores["acc"].higher_is_better is True
        assert group.realised == 48

    def test_shots_of_a_task_written_without_are_left(self, tmp_path: Path) -> None:
        write_tasks(tmp_path)
        write_task(tmp_path, "choices", "never", "num_fewshot: 0")
        write_task(tmp_path, "choices", "three", "num_fewshot: 3")
        names = ["choices", "never", "three"]

        def shots(asked: int | None) -> list[int]:
            tasks = allocmoe.load_tasks(names, tmp_path, shots=asked)
            return [tasks[name]["tasks"][name].config.num_fewshot for name in names]

        assert shots(None) == [0, 0, 3]
        assert shots(2) == [2, 0, 2]

    @pytest.mark.usefixtures("local_only")
    def test_what_cannot_be_loaded_is_one_line(self, tmp_path: Path) -> None:
        write_tasks(tmp_path)
        with pytest.raises(AllocMoEError, match="there is no task 'choises'; near it: choices"):
            allocmoe.load_tasks(["choises"], tmp_path)
        with pytest.raises(AllocMoEError, match="nowhere: no such folder of tasks"):
            allocmoe.load_tasks(["choices"], tmp_path / "nowhere")
        with pytest.raises(AllocMoEError, match="shots must be 0 or more"):
            allocmoe.load_tasks(["choices"], tmp_path, shots=-1)
        with pytest.raises(AllocMoEError, match="no task is given"):
            allocmoe.load_tasks([], tmp_path)
        write_task(tmp_path, "answers", "code", "unsafe_code: true")
        with pytest.raises(AllocMoEError, match="code runs code that the model writes"):
            allocmoe.load_tasks(["code"], tmp_path)
        (tmp_path / "choices.jsonl").unlink()
        with pytest.raises(
            AllocMoEError, match=r"the task choices cannot be loaded: .*choices"
        ) as e:
            allocmoe.load_tasks(["choices"], tmp_path)
        assert "\n" not in str(e.value)

    def test_without_lm_eval(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "lm_eval.tasks.manager", None)
        with pytest.raises(AllocMoEError, match=r"pip install 'allocmoe\[tasks\]'"):
            allocmoe.load_tasks(["choices"], tmp_path)

    def test_what_cannot_be_run_is_one_line(self, folder: Path, bundled: Bundled) -> None:
        tasks = allocmoe.load_tasks(["answers"], folder)
        model = tiny("olmoe", vocab_size=len(bundled[1]), max_position_embeddings=4)
        with pytest.raises(AllocMoEError, match=r"the task answers cannot be run: .*tokens to gen"):
            allocmoe.evaluate_tasks(model, bundled[1], {}, tasks)
        for options in ({"limit": 0}, {"batch_size": 0}):
            with pytest.raises(AllocMoEError, match=f"{next(iter(options))} must be 1 or more"):
                allocmoe.evaluate_tasks(*bundled, {}, tasks, **options)
        plan = allocmoe.make_plan("uniform", "50%", model=model)
        with pytest.raises(AllocMoEError, match="does not fit"):
            allocmoe.evaluate_tasks(*bundled, {"other": plan}, tasks)


def test_numbers_that_are_none_are_none() -> None:
    found = {"alias": "x", "acc,none": float("nan"), "acc_stderr,none": "N/A", "f1,strict": 1}
    assert tasks_module._read_scores(found, ()) == {
        "acc": Score(None, None, None),
        "f1,strict": Score(1.0, None, None),
    }
