"""What Alloc-T's kept experts follow: routing mass against entropy, on the reference model.

python benchmarks/candidate_mass.py demo/plans/alloc-moe@24.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance

import allocmoe
from allocmoe.codec import write_json
from allocmoe.evaluation.analysis import spearman
from allocmoe.models import inspect_model, load
from allocmoe.runtime.control import Observed
from allocmoe.runtime.hf import Controller


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    plan = allocmoe.Plan.load(args.plan)
    model, tokenizer = load.load_model("reference"), load.load_tokenizer("reference")
    text = allocmoe.load_text("builtin:heldout", tokenizer, sequences=16)
    seen: dict[int, list[torch.Tensor]] = {}

    def observe(routing: Observed) -> None:
        entropy = torch.special.entr(routing.logits_TE.double().softmax(1)).sum(1)
        scores = routing.scores_TK.double()
        kept = torch.ones_like(scores) if routing.keep_TK is None else routing.keep_TK.double()
        columns = [entropy, scores.sum(1), scores[:, 1:].sum(1), kept.sum(1)]
        seen.setdefault(routing.layer, []).append(torch.stack(columns, 1))

    with torch.no_grad(), Controller(inspect_model(model), plan.token, observe=observe) as held:
        held.set_budgets(plan.layer_budgets)
        for ids in text.ids.split(4):
            model(ids)
    layers: list[dict[str, Any]] = []
    for layer in sorted(seen):
        entropy, top, rest, kept = torch.cat(seen[layer]).numpy().T
        tenths = np.array_split(np.argsort(entropy, kind="stable"), 10)
        layers.append(
            {
                "layer": layer,
                "mass_of_all_candidates": round(float(top.mean()), 4),
                "mass_after_the_first_by_entropy_tenth": [
                    round(float(rest[rows].mean()), 4) for rows in tenths
                ],
                "kept_correlates_with_that_mass": round(spearman(rest, kept) or 0.0, 4),
                "kept_correlates_with_entropy": round(spearman(entropy, kept) or 0.0, 4),
            }
        )
    result = {"benchmark": "candidate_mass", "layers": layers, **provenance()}
    print(json.dumps(result, indent=2))
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
