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
import statistics
from pathlib import Path
from typing import Any

from allocmoe.artifacts import Plan, Sensitivity
from allocmoe.experiment.settings import load_settings


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--experiment", default="small", help="what the folders are of")
    return parser.parse_args()


def read_cells(folder: Path) -> dict[str, Any]:
    lines = (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines()
    return {cell["cell"]: cell["result"] for cell in map(json.loads, lines)}


def foretold(sensitivity: Sensitivity, plan: Plan) -> float:
    cost = sensitivity.cost()
    return sum(
        cost[layer][sensitivity.ks[layer].index(budget)]
        for layer, budget in enumerate(plan.layer_budgets)
    )


def table(folder: Path, texts: list[str]) -> list[str]:
    cells = read_cells(folder)
    profiles = {
        name.removeprefix("profile-"): Sensitivity.from_json(found, name)
        for name, found in cells.items()
        if name.startswith("profile-") and "-c" not in name
    }
    full = sum(next(iter(profiles.values())).model.k_orig)
    plans: dict[str, list[tuple[str, Plan]]] = {"uniform": []}
    for name, found in cells.items():
        if name.startswith(("plan-alloc-l@", "plan-uniform@")) and "-c" not in name:
            method, _, rest = name.removeprefix("plan-").partition("@")
            budget, *marks = rest.split("-")
            if 2 * int(budget) == full:
                text = next((int(m[1:]) for m in marks if m[0] == "t"), 0)
                seed = next((int(m[1:]) for m in marks if m[0] == "s"), 0)
                row = "uniform" if method == "uniform" else f"alloc-l, {texts[text]}"
                made_on = "" if method == "uniform" else f"t{text}-s{seed}"
                plans.setdefault(row, []).append((made_on, Plan.from_json(found, name)))
    lines = [
        f"{folder.name}, {full // 2} of {full}",
        "",
        "| plan | " + " | ".join(f"by {text}" for text in texts) + " |",
        "|---|" + "---:|" * len(texts),
    ]
    for row, made in plans.items():
        numbers = []
        for index in range(len(texts)):
            found = [
                foretold(profile, plan)
                for made_on, plan in made
                for name, profile in profiles.items()
                if name.startswith(f"t{index}-") and name != made_on
            ]
            numbers.append(f"{statistics.fmean(found):+.4f}" if found else "-")
        lines.append(f"| {row} | " + " | ".join(numbers) + " |")
    return lines


def main() -> None:
    args = parse()
    texts = [text.name for text in load_settings(args.experiment).calibration.texts]
    print("\n\n".join("\n".join(table(folder, texts)) for folder in args.folders))


if __name__ == "__main__":
    main()
