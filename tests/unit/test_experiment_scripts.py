"""The scripts beside the experiments, on the committed results: the docs say what they give."""

from __future__ import annotations

import json
import lzma
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from allocmoe.codec import encode, read_json
from allocmoe.experiment.claims import make_claims
from allocmoe.experiment.settings import load_settings
from allocmoe.experiment.tables import make_tables
from allocmoe.experiment.write import claims_table, markdown

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
MODELS = ("small-olmoe", "small-qwen2-moe", "small-deepseek-v2")
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="a package without its results")


def run(script: str, *words: str | Path) -> str:
    command = [sys.executable, str(ROOT / "experiments" / script), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_verdicts_in_the_docs_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = run("collect.py", *(RESULTS / name for name in MODELS)).splitlines()
    assert len(rows) == 2 + 16
    for row in rows[2:]:
        assert row in page


@pytest.mark.parametrize("name", MODELS)
def test_results_are_what_the_code_makes_of_the_cells(name: str) -> None:
    folder = RESULTS / name
    unpack = runpy.run_path(str(ROOT / "experiments" / "collect.py"))["unpack"]
    results, kept = unpack(folder, load_settings("small")), read_json(folder / "results.json")
    assert kept["claims"] == encode(make_claims(results))
    assert kept["tables"] == encode(make_tables(results))
    page = (folder / "results.md").read_text(encoding="utf-8")
    for line in markdown(claims_table(make_claims(results))):
        assert line in page


def test_packing_keeps_every_cell_and_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    (folder / "cells").mkdir(parents=True)
    cells = [{"cell": f"plan-{name}", "result": {"é": number}} for number, name in enumerate("ab")]
    for cell in cells:
        (folder / "cells" / f"{cell['cell']}.json").write_text(json.dumps(cell))
    (folder / "results.json").write_text('{"cells": 3, "finished": 2, "claims": [], "tables": []}')
    (folder / "results.md").write_text("# One\n\ntables\n\n## Figures\n\n![a](figures/a.svg)\n")
    assert "one: 1 cells are not finished" in run("collect.py", folder, "-o", tmp_path / "packed")
    packed = tmp_path / "packed" / "one"
    with lzma.open(packed / "cells.jsonl.xz", "rt", encoding="utf-8") as file:
        assert [json.loads(line) for line in file] == cells
    assert (packed / "results.md").read_text() == "# One\n\ntables\n\n"
    assert json.loads((packed / "results.json").read_text())["finished"] == 2


def test_what_profiles_foretell() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for name in ("small-qwen2-moe", "small-deepseek-v2"):
        rows = run("foretell.py", RESULTS / name).splitlines()
        foretold = {cells[0]: cells[1:] for cells in (row.strip("| ").split(" | ") for row in rows)}
        for plan in ("uniform", "alloc-l, WikiText2"):
            assert len(foretold[plan]) == 3
            for number in foretold[plan]:
                assert number in page, (name, plan)
        # a plan is not judged by the profile that it was made from
        assert foretold["alloc-l, C4"][1] == foretold["alloc-l, Pile"][2] == "-"
