"""An experiment as files: results.md with every table and figure, results.json with the same."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from allocmoe.codec import encode, write_bytes, write_json, write_text
from allocmoe.experiment.claims import Claim, make_claims
from allocmoe.experiment.figures import make_figures
from allocmoe.experiment.results import Results
from allocmoe.experiment.tables import Table, make_tables
from allocmoe.report.drawing import LIGHT, Plot, render


def write_results(results: Results, folder: Path, command: str) -> Path:
    """Tables and figures of what is finished; gives the page. Figures need matplotlib."""
    tables, claims = make_tables(results), make_claims(results)
    figures = make_figures(results) if find_spec("matplotlib") else []
    for figure in figures:
        for kind in ("svg", "png"):
            write_bytes(folder / "figures" / f"{figure.key}.{kind}", render(figure, LIGHT, kind))
    write_json(
        folder / "results.json",
        {
            "title": results.settings.title,
            "model": encode(results.info),
            "command": command,
            "cells": len(results.grid.cells),
            "finished": len(results.found),
            "claims": encode(claims),
            "tables": encode(tables),
        },
    )
    page = folder / "results.md"
    write_text(page, _page(results, command, claims, tables, figures))
    return page


def _page(
    results: Results,
    command: str,
    claims: Sequence[Claim],
    tables: Sequence[Table],
    figures: Sequence[Plot],
) -> str:
    left = len(results.grid.cells) - len(results.found)
    lines = [
        f"# {results.settings.title}: {results.info.id}",
        "",
        f"Made by `{command}`.",
        *([f"{left} of {len(results.grid.cells)} cells are not finished."] if left else []),
        "± is the standard deviation over seeds where there are several, else the standard error",
        "that the items leave. Bold is the best of its column.",
        "",
        "## The paper's claims",
        "",
        *markdown(claims_table(claims)),
        "",
        "## Tables",
    ]
    for table in tables:
        lines += ["", f"### {table.title}", "", *markdown(table)]
        lines += ["", table.note] if table.note else []
    lines += ["", "## Figures"]
    if not figures:
        lines += ["", "None: `pip install 'allocmoe[report]'` and run the same command again."]
    for figure in figures:
        lines += ["", f"![{figure.title}](figures/{figure.key}.svg)", "", figure.caption]
    return "\n".join(lines) + "\n"


def claims_table(claims: Sequence[Claim]) -> Table:
    return Table(
        "claims",
        "The paper's claims",
        ("claim", "judged by", "the paper", "here", "verdict"),
        tuple((c.name, c.by, c.paper, c.here, c.verdict) for c in claims),
    )


def markdown(table: Table) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [row(table.columns), "|" + "---|" * len(table.columns), *map(row, table.rows)]
