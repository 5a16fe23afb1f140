from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allocmoe.artifacts import (
    Analysis,
    Artifact,
    Benchmark,
    Context,
    Decode,
    Evaluation,
    LayerAnalysis,
    Machine,
    ModelInfo,
    Plan,
    Prefill,
    Protocol,
    Quality,
    Score,
    Sensitivity,
    Speed,
    SweepRow,
    TaskEvaluation,
    TaskResult,
    TaskRow,
    TextInfo,
    Timing,
    TokenRule,
)
from allocmoe.cli import report as verb
from allocmoe.errors import AllocMoEError
from allocmoe.report import write_report

pytest.importorskip("matplotlib", reason="the report needs matplotlib")

EVIL = "<script>alert('$x')</script>"
MODEL = ModelInfo("tiny/moe", None, "olmoe", (4, 4, 4), (8, 8, 8), "aa" * 8)
TEXT = TextInfo("builtin:heldout", "ab" * 32, 4, 64)
MADE: dict[str, Any] = dict(
    text=TEXT, versions={"python": "3.11"}, created="2026-01-01T00:00:00+00:00"
)
PLOTS = {
    "quality-1",
    "spending-1",
    "speed-1",
    "sensitivity-1",
    "layer-budgets",
    "load-1",
    "entropy-1",
    "sweep-k-base-1",
    "sweep-text-1",
}


def quality(name: str, method: str, budget: float, rise: float, over: float = 0.0) -> Quality:
    share = (budget + over) / 3
    token = "alloc-t/batch" if method in ("alloc-moe", "alloc-t") else "none"
    return Quality(
        name, method, token, budget, 10 + rise, rise, rise, 0.8, 3 * share, (share,) * 3, (5.0,) * 3
    )


def evaluation(model: ModelInfo = MODEL, name: str = "alloc-moe@6") -> Evaluation:
    rows = (
        quality("unmodified", "unmodified", 12, 0.0),
        quality(name, "alloc-moe", 6, 0.1),
        quality("alloc-moe@9", "alloc-moe", 9, 0.01),
        quality("uniform@6", "uniform", 6, 0.4),
        quality("uniform@9", "uniform", 9, 0.05),
        quality("naee@6", "naee", 6, 0.09, over=0.5),
        quality("naee@9", "naee", 9, 0.06),
    )
    return Evaluation(model=model, batch_size=2, rows=rows, **MADE)


def sensitivity(model: ModelInfo = MODEL) -> Sensitivity:
    return Sensitivity(
        model=model,
        context=Context("paper", (4.0,) * 3, (1.0,) * 3),
        token=TokenRule(),
        ks=((1.0, 2.0, 4.0), (1.0, 4.0), (1.0, 2.0, 4.0)),
        perplexity=((40.0, 20.0, 10.0), (12.0, 10.0), (11.0, 9.9, 10.0)),
        base_perplexity=10.0,
        seconds=1.0,
        **MADE,
    )


def plan(model: ModelInfo = MODEL, method: Any = "alloc-moe") -> Plan:
    return Plan(
        model=model,
        method=method,
        layer_budgets=(3.0, 1.0, 2.0) if method == "alloc-moe" else (2.0, 2.0, 2.0),
        token=TokenRule(),
        budget_asked="50%",
        budget=6,
        budget_used=6.0,
        predicted_loss=None,
        normalisation=None,
        context=None,
        **MADE,
    )


def analysis(model: ModelInfo = MODEL) -> Analysis:
    layer = LayerAnalysis(
        load_before=(0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05),
        load_after=(0.35, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.0),
        spearman=0.9,
        entropy_before=0.9,
        entropy_after=0.85,
        js_divergence=0.01,
        entropy_correlation=0.25,
        kept_by_entropy=((1.0, 1.5, 10.0), (1.5, 2.0, 10.0), (1.9, 2.5, 10.0)),
    )
    same = replace(layer, entropy_correlation=None, kept_by_entropy=((1.0, 2.0, 30.0),))
    sweep = (SweepRow("0", 11.0, 0.1, 6.0, (3, 1, 2)), SweepRow("1", 12.0, 0.2, 6.0, (2, 2, 2)))
    return Analysis(
        model=model,
        name="plan",
        method="alloc-moe",
        budget=6,
        token="alloc-t/batch",
        layer_budgets=(3.0, 1.0, 2.0),
        realised_per_layer=(3.0, 1.0, 2.0),
        layers=(layer, same, layer),
        k_base_sweep=sweep,
        text_sweep=sweep,
        **MADE,
    )


def speed(name: str, method: str, prefill_ms: float, step_ms: float, experts_ms: float) -> Speed:
    def timing(ms: float) -> Timing:
        return Timing.of((0.98 * ms, ms, 1.02 * ms))

    decode = Decode(
        compiled=True,
        captured=True,
        step=timing(step_ms),
        speedup=4 / step_ms,
        tokens_per_second=8000 / step_ms,
        experts=timing(experts_ms),
        rest_ms=step_ms - experts_ms,
        realised_per_layer=(2.0,) * 3,
        distinct_per_step=(5.0,) * 3,
        floor_bytes=10**9,
        floor_ms=1.0,
        times_floor=step_ms,
    )
    prefill = Prefill(32, True, timing(prefill_ms), 10 / prefill_ms, (2.0,) * 3)
    return Speed(name, method, "none", 6.0, "allocmoe", (prefill,), decode)


def speeds(model: ModelInfo = MODEL, name: str = "alloc-moe@6") -> Benchmark:
    return Benchmark(
        model=model,
        protocol=Protocol(),
        machine=Machine("A processor", 8, "A GPU", "Linux"),
        command="allocmoe bench x",
        dtype="bfloat16",
        random_weights=True,
        fused=True,
        copy_bytes_per_second=4e12,
        prefill_drift=0.012,
        decode_drift=-0.003,
        rows=(
            speed("unmodified", "unmodified", 10.0, 4.0, 3.0),
            speed(name, "alloc-moe", 8.0, 2.5, 1.5),
            speed("uniform@6", "uniform", 8.0, 3.2, 3.3),
        ),
        **MADE,
    )


def task_row(name: str, accuracy: float, perplexity: float | None, realised: float) -> TaskRow:
    scores = {
        "acc": Score(accuracy, 0.025, True),
        "exact_match,strict": Score(0.5, None, True),
    }
    loss = {"word_perplexity": Score(perplexity, None, False)}
    share = (realised / 3,) * 3
    tasks = (
        TaskResult("arc_easy", 40, 5, scores, realised, share),
        TaskResult("wikitext", 7, None, loss, realised + 0.25, share),
    )
    return TaskRow(name, "alloc-moe", "alloc-t/threshold", 6, tasks)


def task_evaluation(model: ModelInfo = MODEL, name: str = "alloc-moe@6") -> TaskEvaluation:
    rows = (task_row("unmodified", 0.75, 112.5, 12), task_row(name, 0.625, None, 6))
    made = MADE | {"text": None, "versions": {"lm-eval": "0.4.13"}}
    return TaskEvaluation(model=model, batch_size=8, limit=40, rows=rows, **made)


def fill(folder: Path) -> Path:
    artifacts: dict[str, Artifact] = {
        "compare.json": evaluation(),
        "sensitivity.json": sensitivity(),
        "plans/half.json": plan(),
        "plans/uniform.json": plan(method="uniform"),
        "analysis.json": analysis(),
        "bench.json": speeds(),
        "tasks.json": task_evaluation(),
    }
    for name, artifact in artifacts.items():
        artifact.save(folder / name)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = fill(tmp_path_factory.mktemp("report"))
    write_report(folder)
    return folder


def page_of(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_every_plot_is_on_the_page_and_beside_it(written: Path) -> None:
    page = page_of(written)
    for key in PLOTS:
        assert f'class="card" id="{key}"' in page
    assert page.count('<figure role="img" aria-label="') == len(PLOTS)
    assert page.count("<details>") == len(PLOTS) + 1  # and every metric of the tasks
    assert page.count("<svg") == 2 * len(PLOTS)
    files = {path.name for path in (written / "plots").iterdir()}
    assert files == {f"{key}.{kind}" for key in PLOTS for kind in ("svg", "png")}
    for path in (written / "plots").iterdir():
        start = b"\x89PNG" if path.suffix == ".png" else b"<?xml"
        assert path.read_bytes().startswith(start)


def test_ids_are_unique_and_every_reference_has_its_target(written: Path) -> None:
    page = page_of(written)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page))
    assert used
    assert used <= set(ids)


def test_the_page_loads_nothing(written: Path) -> None:
    page = page_of(written)
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', page)
    assert "@import" not in page
    assert "<image" not in page


def test_captions_and_headlines_come_from_the_numbers(written: Path) -> None:
    page = page_of(written)
    # naee is lower at 6, but it overspends
    assert "At 6 of 12 activations alloc-moe@6 is best (+0.1000, uniform +0.4000)" in page
    assert "best at 6 of 12 (50%)" in page
    assert "over the budget: naee" in page
    assert "MoE layer 0 suffers most from fewer experts (+1.386 at k=1)" in page
    assert "At 6, alloc-moe gives the most to layer 0 (3) and the least to layer 1 (1)" in page
    assert "Best is 0 (+0.1000), worst 1 (+0.2000)" in page
    assert "A GPU, bfloat16, 8 sequences, 128 tokens decoded after 32; medians of 10 runs" in page
    assert "alloc-moe@6 decodes fastest, 1.60 times as fast as the unmodified model" in page
    assert "the unmodified model took +1.2% (prefill) and -0.3% (decode)" in page
    assert "The weights are random: a trained model routes less evenly." in page
    assert "allocmoe bench x" in page
    for fact in ("tiny/moe", "plans/half.json", "2026-01-01T00:00:00+00:00", "python 3.11"):
        assert fact in page


def test_tasks_are_tables(written: Path, tmp_path: Path) -> None:
    page = page_of(written)
    assert "<h3>Tasks of lm-eval 0.4.13, at most 40 items of each (tasks.json)</h3>" in page
    assert "arc_easy (acc)</th>" in page
    assert "wikitext (word_perplexity ↓)</th>" in page
    base = ("unmodified", "6", "12.00-12.25", "0.7500 ±0.0250", "112.5")
    plan = ("alloc-moe@6", "6", "6.00-6.25", "0.6250 -0.1250", "-")
    for cells in (base, plan):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in re.sub(' class="number"', "", page)
    # every metric, and none where there is none
    assert page.count("<td>exact_match,strict</td>") == 2
    assert "<td>mixed</td>" in page
    task_evaluation().save(tmp_path / "alone.json")
    assert write_report(tmp_path).plots == ()
    assert "Tasks of lm-eval" in page_of(tmp_path)


def test_the_same_folder_gives_the_same_bytes(written: Path, tmp_path: Path) -> None:
    write_report(fill(tmp_path / "elsewhere"))
    other = tmp_path / "elsewhere"
    assert page_of(other) == page_of(written)
    for path in (written / "plots").iterdir():
        assert (other / "plots" / path.name).read_bytes() == path.read_bytes(), path.name


def test_names_are_escaped(tmp_path: Path) -> None:
    evil = replace(MODEL, id=EVIL)
    evaluation(evil, name=EVIL).save(tmp_path / "a.json")
    replace(sensitivity(evil), text=replace(TEXT, source=EVIL), versions={EVIL: EVIL}).save(
        tmp_path / "'><b>.json"
    )
    replace(speeds(evil, name=EVIL), command=EVIL).save(tmp_path / "speeds.json")
    task_evaluation(evil, name=EVIL).save(tmp_path / "tasks.json")
    replace(plan(evil), budget_asked=EVIL).save(tmp_path / "$p$.json")
    write_report(tmp_path)
    page = page_of(tmp_path)
    assert page.count("<script>") == 1
    assert "alert('" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;alert(&#x27;$x&#x27;)" in page


@pytest.mark.parametrize(
    "artifact", [evaluation(), sensitivity(), plan(), plan(method="uniform"), analysis(), speeds()]
)
def test_one_artefact_is_enough(artifact: Artifact, tmp_path: Path) -> None:
    artifact.save(tmp_path / "one.json")
    assert write_report(tmp_path, tmp_path / "x" / "out.html").plots
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "x" / "out.html").read_text().startswith("<!DOCTYPE html>")


def test_evaluations_on_two_texts_are_kept_apart(tmp_path: Path) -> None:
    evaluation().save(tmp_path / "a.json")
    evaluation().save(tmp_path / "again.json")
    replace(evaluation(), text=replace(TEXT, source="c4")).save(tmp_path / "b.json")
    write_report(tmp_path)
    page = page_of(tmp_path)
    assert "Quality against budget on builtin:heldout" in page
    assert "Quality against budget on c4" in page
    assert page.count("<td>alloc-moe@9</td>") == 2 * 3  # two plots and a table on each text


def test_a_rise_that_is_not_positive_and_an_unknown_method_can_be_drawn(tmp_path: Path) -> None:
    rows = (
        quality("better", "alloc-moe", 6, -0.1),
        quality("new", "brand-new", 6, 3.0),
        replace(quality("other rule", "alloc-moe", 6, 0.5), token="alloc-t/threshold"),
    )
    replace(evaluation(), rows=rows).save(tmp_path / "a.json")
    write_report(tmp_path)
    assert "brand-new" in page_of(tmp_path)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (replace(MODEL, family="mixtral"), "family olmoe, here mixtral"),
        (replace(MODEL, k_orig=(4, 3, 4)), "k_orig 4 in MoE layer 1, here 3"),
        (replace(MODEL, fingerprint="bb"), f"fingerprint {'aa' * 8}, here bb"),
    ],
)
def test_artefacts_of_two_models_are_refused(
    other: ModelInfo, difference: str, tmp_path: Path
) -> None:
    plan().save(tmp_path / "a.json")
    replace(evaluation(), model=other).save(tmp_path / "sub" / "b.json")
    with pytest.raises(AllocMoEError, match=r"a\.json and sub/b\.json are of different") as caught:
        write_report(tmp_path)
    assert difference in str(caught.value)
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "plots").exists()


def test_another_id_or_weights_never_read_are_fine(tmp_path: Path) -> None:
    plan(replace(MODEL, id="/a/path", fingerprint=None)).save(tmp_path / "a.json")
    evaluation().save(tmp_path / "b.json")
    write_report(tmp_path)
    assert "<h1>tiny/moe</h1>" in page_of(tmp_path)


def test_json_that_is_no_artefact_is_ignored(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    (tmp_path / "config.json").write_text('{"kind": "something", "x": 1}')
    (tmp_path / "list.json").write_text('[{"kind": "allocmoe.plan"}]')
    (tmp_path / "broken.json").write_text('{"a": ')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.json").mkdir()
    assert write_report(tmp_path).artifacts == ("plan.json",)


def test_a_broken_artefact_is_an_error(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    whole = (tmp_path / "plan.json").read_text()
    (tmp_path / "cut.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(AllocMoEError, match=r"cut.json: not JSON, or cut off"):
        write_report(tmp_path)
    (tmp_path / "cut.json").write_text(json.dumps(json.loads(whole) | {"extra": 1}))
    with pytest.raises(AllocMoEError, match=r"cut.json: unknown key 'extra'"):
        write_report(tmp_path)
    (tmp_path / "cut.json").write_text('{"kind": "allocmoe.future"}')
    with pytest.raises(AllocMoEError, match=r"cut.json: not an allocmoe artefact"):
        write_report(tmp_path)


def test_a_folder_with_nothing_in_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AllocMoEError, match="no allocmoe artefact"):
        write_report(tmp_path)
    with pytest.raises(AllocMoEError, match="no such folder"):
        write_report(tmp_path / "missing")
    plan().save(tmp_path / "plan.json")
    with pytest.raises(AllocMoEError, match="not a folder"):
        write_report(tmp_path / "plan.json")
    with pytest.raises(AllocMoEError, match="the report is HTML"):
        write_report(tmp_path, tmp_path / "plan.json")


def test_without_matplotlib_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan().save(tmp_path / "plan.json")
    real = builtins.__import__

    def refuse(name: str, *args: Any, **keys: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **keys)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(AllocMoEError, match=re.escape("pip install 'allocmoe[report]'")):
        write_report(tmp_path)
    assert not (tmp_path / "plots").exists()


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan().save(tmp_path / "plan.json")
    verb.run(Namespace(directory=str(tmp_path), output=None, json=False))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert str(tmp_path / "report.html") in shown.err
    parser = ArgumentParser()
    verb.add_arguments(parser)
    args = parser.parse_args([str(tmp_path), "-o", str(tmp_path / "x.html")])
    args.json = True
    verb.run(args)
    document = json.loads(capsys.readouterr().out)
    assert document["artifacts"] == ["plan.json"]
    assert Path(document["report"]).is_file()
    assert all(Path(path).is_file() for path in document["plots"])


def test_the_report_needs_no_torch_and_no_plotting_to_be_imported() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None); import allocmoe.report; "
        "assert 'matplotlib' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
