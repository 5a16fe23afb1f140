"""The demo and the analysis, on the bundled model with less text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from cli_runner import run

from allocmoe.artifacts import Analysis, Evaluation, Plan, Sensitivity
from allocmoe.cli import demo


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    directory = tmp_path_factory.mktemp("demo") / "new"
    with pytest.MonkeyPatch.context() as patch:
        whole = demo._defaults()
        less = {"sequences": 4, "eval_sequences": 2, "length": 96}
        patch.setattr(demo, "_defaults", lambda: argparse.Namespace(**{**vars(whole), **less}))
        ran = run("demo", "-o", directory, "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert Path(document["report"]) == directory / "report.html"
    return directory


def test_demo_leaves_everything_behind(shown: Path) -> None:
    assert Sensitivity.load(shown / "sensitivity.json").model.id == "reference"
    rows = Evaluation.load(shown / "compare.json").rows
    assert len(rows) == 1 + 3 * 9
    for row in rows[1:]:
        plan = Plan.load(shown / "plans" / f"{row.name}.json")
        if plan.token.rule in ("none", "alloc-t"):
            assert row.realised == pytest.approx(plan.budget_used, abs=0.1)
    analysis = Analysis.load(shown / "analysis.json")
    assert [row.value for row in analysis.k_base_sweep] == ["0", "1", "2", "3", "4", "5"]
    assert (shown / "compare.md").read_text().count("\n") == len(rows) + 2
    assert "<svg" in (shown / "report.html").read_text()
    assert list((shown / "plots").glob("*.svg"))


def test_bundled_model_is_small_and_whole() -> None:
    import allocmoe.models.load as load

    folder = Path(load.place("reference"))
    files = [folder / name for name in ("model.safetensors", "tokenizer.json")]
    assert sum(file.stat().st_size for file in files) <= 9_000_000
    assert json.loads((folder / "training.json").read_text())["val_bits_per_byte"] < 1.4
    model = load.load_model("reference")
    assert model.config.model_type == "olmoe"
    assert not model.config.norm_topk_prob


def test_analyze(shown: Path, tmp_path: Path) -> None:
    out = tmp_path / "analysis.json"
    plan = shown / "plans" / "alloc-moe@24.json"
    small = ["--sequences", "2", "--length", "64"]
    ran = run("analyze", "reference", "--plan", plan, *small, "-o", out, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out) == json.loads(out.read_text())
    assert len(Analysis.load(out).layers) == 8
    assert run("inspect", out).code == 0


def test_a_report_of_artefacts_that_do_not_belong_together(
    shown: Path, model: Path, tmp_path: Path
) -> None:
    from shutil import copy

    copy(shown / "compare.json", tmp_path)
    foreign = tmp_path / "foreign.json"
    plan = ["plan", "--method", "uniform", "--budget", "50%", "--model", model]
    assert run(*plan, "-o", foreign).code == 0
    ran = run("report", tmp_path)
    assert ran.code == 2
    assert "foreign.json" in ran.err.replace("\n", "")
    assert not (tmp_path / "report.html").exists()
