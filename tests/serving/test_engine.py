"""Profiles and evaluations through vLLM are those of transformers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm_runner import model

import allocmoe
from allocmoe.errors import AllocMoEError
from allocmoe.runtime.vllm.engine import VllmEngine

TEXT = allocmoe.text_from_ids(
    torch.randint(3, 128, (3, 16), generator=torch.Generator().manual_seed(2))
)
# of the perplexities, relative: float32 on two engines
TOLERANCE = 1e-4


@pytest.fixture(params=["olmoe", "qwen2_moe"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(family: str, folders: dict[str, Path]) -> Iterator[Any]:
    options = dict(distributed_executor_backend="uni", max_num_seqs=8, disable_log_stats=True)
    made = VllmEngine(str(folders[family]), max_length=16, dtype="float32", options=options)
    yield made
    made.close()
    gc.collect()


def test_the_profile_is_that_of_transformers(family: str, engine: Any) -> None:
    ours = allocmoe.profile(engine, TEXT)
    theirs = allocmoe.profile(model(family), TEXT)
    assert ours.ks == theirs.ks
    assert ours.model.difference(theirs.model) is None
    for row, expected in zip(ours.perplexity, theirs.perplexity, strict=True):
        assert row == pytest.approx(expected, rel=TOLERANCE)
    assert ours.base_perplexity == pytest.approx(theirs.base_perplexity, rel=TOLERANCE)


def test_the_evaluation_is_that_of_transformers(family: str, engine: Any) -> None:
    loaded = model(family)
    plans = {
        "uniform": allocmoe.make_plan("uniform", "50%", model=loaded),
        "batch": allocmoe.make_plan("alloc-t", "50%", model=loaded),
        "naee": allocmoe.make_plan("naee", "50%", model=loaded, text=TEXT),
    }
    ours = allocmoe.evaluate(engine, plans, TEXT)
    theirs = allocmoe.evaluate(loaded, plans, TEXT, batch_size=3)
    for row, expected in zip(ours.rows, theirs.rows, strict=True):
        assert row.name == expected.name
        assert row.perplexity == pytest.approx(expected.perplexity, rel=TOLERANCE)
        assert row.realised_per_layer == pytest.approx(expected.realised_per_layer)
        assert row.kl is None
    assert ours.rows[0].top1_agreement == 1


def test_a_text_as_long_as_the_model_takes_leaves_no_room(folders: dict[str, Path]) -> None:
    longest = model("olmoe").config.max_position_embeddings
    with pytest.raises(AllocMoEError, match="shorter sequences"):
        VllmEngine(str(folders["olmoe"]), max_length=longest, dtype="float32")


def test_an_engine_with_graphs_keeps_its_plan(engine: Any) -> None:
    plan = allocmoe.make_plan("uniform", "50%", model=model("olmoe"))
    engine._llm.llm_engine.vllm_config.model_config.enforce_eager = False
    with pytest.raises(AllocMoEError, match="enforce-eager"):
        engine.follow(plan)


def test_tasks_score_as_in_transformers(trained: str, tmp_path: Path) -> None:
    """Log-likelihoods, choices and generation, on the bundled model."""
    pytest.importorskip("lm_eval")
    from allocmoe.models.load import load_model, load_tokenizer
    from task_files import write_tasks

    loaded, tokenizer = load_model(trained, dtype="float32"), load_tokenizer(trained)
    plan = allocmoe.make_plan("uniform", "50%", model=loaded)
    tasks = allocmoe.load_tasks(["choices", "last_word", "answers"], write_tasks(tmp_path))
    theirs = allocmoe.evaluate_tasks(loaded, tokenizer, {"half": plan}, tasks, batch_size=1)
    options = dict(distributed_executor_backend="uni", max_num_seqs=8, disable_log_stats=True)
    engine = VllmEngine(trained, max_length=128, dtype="float32", tokenizes=True, options=options)
    ours = allocmoe.evaluate_tasks(engine, tokenizer, {"half": plan}, tasks)
    engine.close()
    gc.collect()
    for row, expected in zip(ours.rows, theirs.rows, strict=True):
        assert row.name == expected.name
        for task, other in zip(row.tasks, expected.tasks, strict=True):
            assert (task.task, task.num_items) == (other.task, other.num_items)
            for name, score in task.scores.items():
                assert score.value == pytest.approx(other.scores[name].value, rel=1e-4)
            assert task.realised_per_layer == pytest.approx(other.realised_per_layer)


def test_the_command_line(trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`profile` and `eval` with --engine vllm give what they give without."""
    from allocmoe.artifacts import Evaluation, Sensitivity
    from allocmoe.cli.main import main

    def allocmoe_(*words: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(words)
        gc.collect()
        assert not ended.value.code, capsys.readouterr().err

    vllm = ["--engine", "vllm", "--engine-option", "distributed_executor_backend=uni"]
    text = ["--sequences", "2", "--length", "24", "--dtype", "float32"]
    perplexities = []
    for engine in ([], vllm):
        file = str(tmp_path / f"s{len(engine)}.json")
        allocmoe_("profile", trained, *text, "--grid", "1,3", "-o", file, *engine)
        perplexities.append([v for row in Sensitivity.load(file).perplexity for v in row])
    assert perplexities[1] == pytest.approx(perplexities[0], rel=TOLERANCE)

    plan = str(tmp_path / "plan.json")
    allocmoe_("plan", "--method", "uniform", "--budget", "50%", "--model", trained, "-o", plan)
    values = []
    for engine in ([], vllm):
        file = str(tmp_path / f"e{len(engine)}.json")
        allocmoe_("eval", trained, "--plan", plan, *text, "-o", file, *engine)
        values.append([(row.perplexity, row.realised) for row in Evaluation.load(file).rows])
    for ours, theirs in zip(*values, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
