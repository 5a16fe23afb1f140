"""Packs finished experiments to be kept, and prints what became of the paper's claims in each.

    python experiments/collect.py small-olmoe small-qwen2-moe -o experiments/results

For every folder, `results.json` (claims and tables), the same as `results.md` without the figures,
and `cells.jsonl.xz` (one line a cell, with its provenance). The tables on stdout are Markdown.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

from allocmoe.codec import decode
from allocmoe.experiment.tables import Table
from allocmoe.experiment.write import markdown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--tables", nargs="*", default=[], help="keys of tables to print too")
    return parser.parse_args()


def main() -> None:
    args = parse()
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
    (output / "results.md").write_text(page.partition("\n## Figures")[0] + "\n", encoding="utf-8")
    cells = [read(path) for path in sorted((folder / "cells").glob("*.json"))]
    lines = [json.dumps(cell, separators=(",", ":"), ensure_ascii=False) for cell in cells]
    packed = lzma.compress("".join(line + "\n" for line in lines).encode(), preset=9)
    (output / "cells.jsonl.xz").write_bytes(packed)


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
