"""What is printed for people is whole: no number cut, no path broken, no name read as markup."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runner import SMALL, succeed

from allocmoe.artifacts import Evaluation, Plan, Sensitivity
from allocmoe.cli import common

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
LONG = "runs/2026-01/a-folder-with-a-long-name/and-another-one/plan"


@pytest.fixture(params=[80, 60, 40])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(common.console, "width", request.param)
    return int(request.param)


def shown(file: Path, width: int) -> str:
    """The tables of an artefact, every line inside the terminal."""
    text = succeed("inspect", file).err.rpartition("\nmodel ")[0]
    assert max(map(len, text.splitlines())) <= width
    return text


def test_a_profile_of_many_k(sensitivity: Path, tmp_path: Path, width: int) -> None:
    measured, k = Sensitivity.load(sensitivity), 10
    made = replace(
        measured,
        model=replace(measured.model, k_orig=(k,) * 4, num_experts=(16,) * 4),
        ks=(tuple(map(float, range(1, k + 1))),) * 4,
        perplexity=tuple(
            tuple(10.0 + (layer + 1) * (i - 4) * (9 - i) / 50 for i in range(k))
            for layer in range(4)
        ),
    )
    made.save(tmp_path / "s.json")
    text = shown(tmp_path / "s.json", width)
    for layer, row in enumerate(made.cost("log")):
        # of every block the cells after the layer's number
        found = re.findall(rf"^│ +{layer} │(.*)│$", text, re.MULTILINE)
        cells = [cell.strip() for cells in found for cell in cells.split("│")]
        assert cells == [f"{value:.4f}" for value in row]
    assert [float(head) for head in re.findall(r"k=(\d+) ", text)] == [*made.ks[0]]


def test_an_evaluation_of_plans_with_long_names(tmp_path: Path, width: int) -> None:
    golden = Evaluation.load(GOLDEN / "evaluation.json")
    rows = tuple(replace(row, name=f"{LONG}-{row.name}") for row in golden.rows)
    replace(golden, rows=rows).save(tmp_path / "e.json")
    text = shown(tmp_path / "e.json", width)
    assert "…" not in text
    words = text.split()
    assert {"budget", "realised", "perplexity", "KL", "top-1", "experts"} <= {*words}
    assert "log rise " in text
    for row in rows:
        assert row.kl is not None
        assert f"{row.realised:.2f}" in words
        assert f"{row.perplexity:.3f}" in words
        assert f"{row.log_rise:+.4f}" in words
        assert f"{row.kl:.4f}" in words
        assert f"{row.top1_agreement:.1%}" in words
        # the name goes on in the lines below, alone
        folded = "".join(line.split(" ")[1] for line in text.splitlines() if line.startswith(" "))
        assert row.name in folded


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.json")), ids=lambda file: file.stem)
def test_nothing_is_left_out_on_a_narrow_terminal(
    file: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = shown(file, width)
    assert "…" not in narrow
    monkeypatch.setattr(common.console, "width", 200)
    number = r"[-+±]?\d+\.\d+%?"
    assert {*re.findall(number, narrow)} == {*re.findall(number, shown(file, 200))}


@pytest.mark.parametrize("name", ["run[old].json", "run[/x]/p.json", "[red]p.json", "a:cat:.json"])
def test_a_path_is_no_markup(
    model: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--method", "uniform", "--budget", "8", "--model", model, "-o", name]
    assert succeed("plan", *options).err.endswith(f"\nsaved in {name}\n")
    assert Plan.load(name).budget == 8


def test_the_name_of_a_model_is_no_markup(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moe[old]:cat:[/x]"
    folder.mkdir(parents=True)
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    title = succeed("inspect", folder).err.replace("\n", "").replace(" ", "")
    assert f"{folder}:olmoe" in title


def test_a_long_path_stays_on_its_line(model: Path, plan: Path, tmp_path: Path) -> None:
    file = tmp_path / LONG / "evaluation.json"
    ran = succeed("eval", model, "--plan", plan, *SMALL, "-o", file)
    assert ran.err.endswith(f"\nsaved in {file}\n")


def test_an_analysis_shows_its_sweeps() -> None:
    assert "sweep over k_base" in succeed("inspect", GOLDEN / "analysis.json").err
