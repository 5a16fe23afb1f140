"""Packs finished experiments to be kept, and prints what became of the paper's claims in each.

    python experiments/collect.py small-olmoe small-qwen2-moe -o experiments/results

For every folder, `results.json` (claims and tables), the same as `results.md` without the figures,
and `cells.jsonl.xz` (one line a cell, with its provenance). The tables on stdout are Markdown.
`--again small` makes claims and tables of folders that are packed already anew, from their cells,
as the code now has them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from allocmoe.artifacts import ModelInfo
from allocmoe.codec import decode
from allocmoe.experiment.grid import make_grid
from allocmoe.experiment.results import Results
from allocmoe.experiment.settings import Settings, load_settings
from allocmoe.experiment.tables import Table
from allocmoe.experiment.write import markdown, write_results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--again", metavar="EXPERIMENT", help="what the packed folders are of")
    parser.add_argument("--tables", nargs="*", default=[], help="keys of tables to print too")
    return parser.parse_args()


def main() -> None:
    args = parse()
    for folder in args.folders if args.again else ():
        write_again(folder, load_settings(args.again))
    results = {folder.name: read(folder / "results.json") for folder in args.folders}
    for folder in args.folders:
        left = results[folder.name]["cells"] - results[folder.name]["finished"]
        if left:
            print(f"{folder.name}: {left} cells are not finished\n")
        if args.output:
            pack(folder, args.output / folder.name)
    print("\n".join(claims(results)))
    for key in args.tables:
        for name, result in results.items():
            print("\n".join(["", *table(name, result, key)]))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def pack(folder: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").write_text((folder / "results.json").read_text())
    page = (folder / "results.md").read_text(encoding="utf-8")
    (output / "results.md").write_text(without_figures(page), encoding="utf-8")
    cells = [read(path) for path in sorted((folder / "cells").glob("*.json"))]
    lines = [json.dumps(cell, separators=(",", ":"), ensure_ascii=False) for cell in cells]
    packed = lzma.compress("".join(line + "\n" for line in lines).encode(), preset=9)
    (output / "cells.jsonl.xz").write_bytes(packed)


def without_figures(page: str) -> str:
    return page.partition("\n## Figures")[0] + "\n"


def unpack(folder: Path, settings: Settings) -> Results:
    """What the cells of a packed folder hold."""
    old = read(folder / "results.json")
    with lzma.open(folder / "cells.jsonl.xz", "rt", encoding="utf-8") as file:
        found = {cell["cell"]: cell["result"] for cell in map(json.loads, file) if "result" in cell}
    calibration = settings.calibration
    if not any(name.endswith("-c1") for name in found):
        # from before the sweep over contexts
        calibration = replace(calibration, contexts=calibration.contexts[:1])
    settings = replace(settings, calibration=calibration)
    info = decode(ModelInfo, old["model"], str(folder))
    model = next(model for model in settings.models.values() if model.id == info.id)
    grid = make_grid(settings, model, info, [task.task for task in settings.tasks.all()])
    # of the data, which is not kept
    notes = [t["note"].removesuffix(".") for t in old["tables"] if t["key"] == "tasks"]
    return Results(settings, model, info, grid, found, missing={}, notes=[n for n in notes if n])


def write_again(folder: Path, settings: Settings) -> None:
    command = read(folder / "results.json")["command"]
    with tempfile.TemporaryDirectory() as scratch:
        page = write_results(unpack(folder, settings), Path(scratch), command)
        (folder / "results.json").write_text(page.with_suffix(".json").read_text())
        text = without_figures(page.read_text(encoding="utf-8"))
        (folder / "results.md").write_text(text, encoding="utf-8")


def claims(results: dict[str, Any]) -> list[str]:
    """One row a claim, one column an experiment: the verdict, and the numbers behind it."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for name, result in results.items():
        for claim in result["claims"]:
            cell = f"**{claim['verdict']}**: {claim['here']}" if claim["here"] else claim["verdict"]
            rows.setdefault((claim["name"], claim["by"]), {})[name] = cell
    cells = [(*key, *(found.get(name, "") for name in results)) for key, found in rows.items()]
    return markdown(Table("claims", "", ("claim", "by", *results), tuple(cells)))


def table(name: str, result: Any, key: str) -> list[str]:
    found = [t for t in result["tables"] if t["key"] == key]
    if not found:
        return [f"{name}: no table {key}"]
    shown = decode(Table, found[0], key)
    return [f"{name}, {shown.title}", "", *markdown(shown)]


if __name__ == "__main__":
    main()
