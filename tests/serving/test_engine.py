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


def test_an_engine_with_graphs_keeps_its_plan(engine: Any) -> None:
    plan = allocmoe.make_plan("uniform", "50%", model=model("olmoe"))
    engine._llm.llm_engine.vllm_config.model_config.enforce_eager = False
    with pytest.raises(AllocMoEError, match="enforce-eager"):
        engine.follow(plan)
