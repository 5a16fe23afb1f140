"""What other sequences in a batch do to a sequence, by scope: alone against in company.

    python benchmarks/company.py -o benchmarks/results/company.json

The bundled model at half of its activations, on held-out text. Each sequence runs alone and in a
batch of eight; compared are the log-probabilities of the text's own tokens and the likeliest next
ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

import allocmoe
from allocmoe.codec import write_json
from allocmoe.models.load import load_model, load_tokenizer

RULES = ("uniform", "alloc-t/batch", "alloc-t/sequence", "alloc-t/threshold")


@torch.no_grad()
def predictions(model: Any, ids_NS: torch.Tensor, batch_size: int) -> tuple[Any, Any]:
    logits = torch.cat([model(ids).logits for ids in ids_NS.split(batch_size)])
    told = logits[:, :-1].log_softmax(-1).gather(-1, ids_NS[:, 1:, None])[..., 0]
    return told, logits.argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--company", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_model("reference", dtype="float32"), load_tokenizer("reference")
    calibration = allocmoe.load_text("builtin", tokenizer, sequences=16, length=args.length)
    text = allocmoe.load_text(
        "builtin:heldout", tokenizer, sequences=args.sequences, length=args.length
    )
    rows = []
    for rule in RULES:
        method, _, scope = rule.partition("/")
        options: dict[str, Any] = {"scope": scope} if scope else {}
        plan = allocmoe.make_plan(method, "50%", model=model, text=calibration, **options)
        with allocmoe.apply(model, plan, count=False):
            alone, first = predictions(model, text.ids, 1)
            together, other = predictions(model, text.ids, args.company)
        moved = (alone - together).abs()
        rows.append(
            {
                "rule": rule,
                "mean_change_of_logprob": round(float(moved.mean()), 5),
                "largest_change_of_logprob": round(float(moved.max()), 4),
                "other_likeliest_token": round(float((first != other).float().mean()), 5),
            }
        )
        print(json.dumps(rows[-1]))
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    result = {"benchmark": "company", "settings": settings, "rows": rows, **provenance()}
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
