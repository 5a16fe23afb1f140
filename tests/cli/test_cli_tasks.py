"""`allocmoe eval --tasks`: scores on tasks of lm-eval instead of the perplexity on a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers
from cli_runner import Ran, fail, run, succeed

from allocmoe.artifacts import TaskEvaluation
from task_files import NAMES, write_tasks


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("this must not be called")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def threshold(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "threshold.json"
    rule = ["--scope", "threshold", "--sequences", "4", "--length", "32"]
    succeed("plan", "--method", "alloc-t", "--budget", "8", "--model", model, *rule, "-o", file)
    return file


@pytest.fixture(scope="module")
def evaluated(
    model: Path,
    plan: Path,
    threshold: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Ran]:
    file = tmp_path_factory.mktemp("evaluated") / "new" / "tasks.json"
    tasks = ["--tasks", ",".join(NAMES), "--tasks-dir", folder]
    plans = ["--plan", plan, "--plan", threshold]
    return file, succeed("eval", model, *plans, *tasks, "-o", file, "--json")


def test_prints_what_it_writes(evaluated: tuple[Path, Ran]) -> None:
    file, ran = evaluated
    written = TaskEvaluation.load(file)
    assert ran.json == json.loads(file.read_text()) == written.to_json()
    assert [row.name for row in written.rows] == ["unmodified", "uniform", "threshold"]
    for row in written.rows:
        assert tuple(result.task for result in row.tasks) == NAMES
    for result in written.rows[1].tasks:
        assert result.realised_per_layer == (2.0,) * 4
    assert (written.batch_size, written.limit) == (8, None)


def test_shows_a_table_and_nothing_of_lm_eval(evaluated: tuple[Path, Ran]) -> None:
    file, ran = evaluated
    assert "Tasks of lm-eval" in ran.err
    for word in ("unmodified", "uniform", "threshold", "choices", "acc_norm", "±", "8.00"):
        assert word in ran.err
    for chatter in ("it/s", "100%|", "bootstrapping", "pretrained", "Generating"):
        assert chatter not in ran.err
    again = succeed("inspect", file, "--json")
    assert again.json == ran.json
    assert "lm-eval 0." in again.err


def test_the_report_takes_it(evaluated: tuple[Path, Ran]) -> None:
    folder = evaluated[0].parent
    succeed("report", folder)
    page = (folder / "report.html").read_text()
    assert "Tasks of lm-eval" in page
    assert "last_word (acc)" in page
    assert "<td>perplexity</td>" in page


def test_options_reach_the_tasks(
    model: Path, plan: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allocmoe.evaluation.quality.evaluate", refuse)
    options = ["--limit", "2", "--shots", "1", "--task-batch-size", "3"]
    chosen = ["--tasks", "choices,last_word", "--tasks-dir", folder]
    document = succeed("eval", model, "--plan", plan, *chosen, *options, "--json").json
    assert (document["limit"], document["batch_size"]) == (2, 3)
    for row in document["rows"]:
        assert [(task["num_items"], task["shots"]) for task in row["tasks"]] == [(2, 1)] * 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "2"], "--limit goes with --tasks"),
        (["--shots", "0"], "--shots goes with --tasks"),
        (["--tasks-dir", "DIR"], "--tasks-dir goes with --tasks"),
        (["--task-batch-size", "2"], "--task-batch-size goes with --tasks"),
        (["--tasks", ","], "expected words"),
        (["--tasks", "choices", "--limit", "0"], "expected a whole number from 1 on, not '0'"),
        (["--tasks", "choices", "--task-batch-size", "x"], "expected a whole number from 1 on"),
        (["--tasks", "choices", "--tasks-dir", "nowhere"], "nowhere: no such folder of tasks"),
        (["--tasks", "choices", "--tasks-dir", "DIR", "--shots", "-1"], "shots must be 0 or more"),
    ],
)
def test_one_line_before_weights_are_read(
    model: Path,
    plan: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    asked = [folder if word == "DIR" else word for word in words]
    assert message in fail("eval", model, "--plan", plan, *asked)


def test_an_unknown_task(
    model: Path, plan: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among all that come with lm-eval; reading them takes seconds, so it is tried once."""
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    ran = run("eval", model, "--plan", plan, "--tasks", "hellaswagg", "--tasks-dir", folder)
    assert ran.error.startswith("there is no task 'hellaswagg'; near it: hellaswag")


def test_without_lm_eval(
    model: Path, plan: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.manager", None)
    line = fail("eval", model, "--plan", plan, "--tasks", "choices", "--tasks-dir", folder)
    assert "pip install 'allocmoe[tasks]'" in line
