"""What the sensitivity on one text foretells of plans that were made on another.

    python experiments/foretell.py experiments/results/small-*

For every folder that collect.py packed: the summed sensitivity (rise of the log-perplexity in nats
a token) of Uniform and of Alloc-L's plans at half the budget, by the profile on each text. Where a
text has several seeds, a plan is judged by the profiles of the others. Only the experiment's main
context counts.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from pathlib import Path
from typing import Any

from allocmoe.artifacts import Plan, Sensitivity
from allocmoe.experiment.grid import Cell, PlanName
from allocmoe.experiment.settings import Settings, load_settings
from allocmoe.experiment.tables import Table
from allocmoe.experiment.write import markdown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--experiment", default="small", help="what the folders are of")
    return parser.parse_args()


def read_cells(folder: Path) -> dict[str, Any]:
    with lzma.open(folder / "cells.jsonl.xz", "rt", encoding="utf-8") as file:
        return {cell["cell"]: cell["result"] for cell in map(json.loads, file)}


def foretold(sensitivity: Sensitivity, plan: Plan) -> float:
    cost = sensitivity.cost()
    return sum(
        cost[layer][sensitivity.ks[layer].index(budget)]
        for layer, budget in enumerate(plan.layer_budgets)
    )


def table(folder: Path, settings: Settings) -> list[str]:
    cells = read_cells(folder)
    texts = [text.name for text in settings.calibration.texts]
    profiles = {
        (text, seed): Sensitivity.from_json(cells[name], name)
        for text in range(len(texts))
        for seed in range(settings.seeds)
        if (name := Cell("profile", text=text, seed=seed).id) in cells
    }
    full = sum(profiles[0, 0].model.k_orig)

    def plan(name: PlanName) -> Plan:
        return Plan.from_json(cells[Cell("plan", plan=name).id], name.label)

    # by the profile that they come of
    rows: dict[str, dict[tuple[int, int] | None, Plan]] = {
        "uniform": {None: plan(PlanName("uniform", full // 2))}
    }
    for text, seed in profiles:
        made = rows.setdefault(f"alloc-l, {texts[text]}", {})
        made[text, seed] = plan(PlanName("alloc-l", full // 2, seed, text))
    shown = []
    for label, plans in rows.items():
        numbers = []
        for text in range(len(texts)):
            found = [
                foretold(profile, made)
                for source, made in plans.items()
                for judge, profile in profiles.items()
                if judge[0] == text and judge != source
            ]
            numbers.append(f"{statistics.fmean(found):+.4f}" if found else "-")
        shown.append((label, *numbers))
    columns = ("plan", *(f"by {text}" for text in texts))
    title = f"{folder.name}, {full // 2} of {full}"
    return [title, "", *markdown(Table("foretold", title, columns, tuple(shown)))]


def main() -> None:
    args = parse()
    settings = load_settings(args.experiment)
    print("\n\n".join("\n".join(table(folder, settings)) for folder in args.folders))


if __name__ == "__main__":
    main()
