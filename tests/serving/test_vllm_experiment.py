"""An experiment whose texts and tasks run in vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from allocmoe.experiment.grid import make_grid
from allocmoe.experiment.run import Agenda, run_grid
from allocmoe.experiment.settings import load_settings
from allocmoe.experiment.store import Store
from allocmoe.experiment.worker import Job
from allocmoe.models import inspect_model
from allocmoe.models.load import load_model
from tiny_experiment import write_experiment

SAMPLE = Path(__file__).parents[2] / "experiments" / "sample"
OPTIONS = dict(distributed_executor_backend="uni", max_num_seqs=8, disable_log_stats=True)


def test_vllm_measures_what_transformers_does(trained: str, tmp_path: Path) -> None:
    settings = load_settings(str(write_experiment(tmp_path, methods='["uniform", "alloc-l"]')))
    found = {}
    for engine in ("transformers", "vllm"):
        job = Job(
            settings,
            "one",
            trained,
            dtype="float32",
            engine=engine,
            engine_options=OPTIONS if engine == "vllm" else {},
            max_length=128,
            data=str(SAMPLE),
        )
        info = inspect_model(load_model(trained)).info
        grid = make_grid(settings, settings.model("one"), info, ["sciq"])
        store = Store.open(tmp_path / engine, job)
        assert run_grid(job, grid, store) == {}
        found[engine] = Agenda(grid, store).results
    ours, theirs = found["vllm"], found["transformers"]
    assert {*ours} == {*theirs}
    for name in ours:
        if name.startswith("text-"):
            for row, expected in zip(ours[name]["rows"], theirs[name]["rows"], strict=True):
                assert row["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)
                assert row["realised"] == expected["realised"]
        if name.startswith("task-"):
            assert ours[name]["scores"] == theirs[name]["scores"]
            assert ours[name]["num_items"] == 2
