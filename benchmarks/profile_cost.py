"""What a profile costs: our walk against Algorithm 1 taken literally, on one model, in one run.

    python benchmarks/profile_cost.py    # OLMoE-1B-7B with every width an eighth, on the CPU
    python benchmarks/profile_cost.py --device cuda --dtype bfloat16 --hidden 2048 \\
        --expert-width 1024 --vocabulary 50304    # its real size
    python benchmarks/profile_cost.py --device cuda --shape deepseek-v2-lite --sequences 32 \\
        --length 512 --batch-size 16    # a public shape, both ways in our fused kernel

Each way runs in a process of its own, in turns, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from transformers import OlmoeConfig, OlmoeForCausalLM

import allocmoe
from allocmoe.codec import write_json
from allocmoe.models import inspect_model
from allocmoe.models.shapes import build_shape
from allocmoe.runtime.loss import logits_of, nll_sum, num_predictions
from allocmoe.text import Text

WAYS = ("walk", "literal")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="a public shape instead of the sizes below")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--expert-width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=6288)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, default=None)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[Any, Text]:
    config = OlmoeConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.expert_width,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 64),
        num_key_value_heads=max(1, args.hidden // 64),
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        max_position_embeddings=max(args.length, 512),
    )
    torch.manual_seed(0)
    model: Any
    if args.shape:
        model = build_shape(args.shape, device=args.device)
        allocmoe.use_kernel(model)
    else:
        torch.set_default_dtype(getattr(torch, args.dtype))
        with torch.device(args.device):
            model = OlmoeForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, model.config.vocab_size, (args.sequences, args.length))
    return model, allocmoe.text_from_ids(ids, "random tokens")


@torch.no_grad()
def literal(model: Any, text: Text, batch_size: int) -> list[list[float]]:
    """Algorithm 1 as the paper prints it: a whole forward over the text for every entry."""
    layers = inspect_model(model).layers
    allocation = [layer.k_orig for layer in layers]

    def perplexity() -> float:
        for layer, k in zip(layers, allocation, strict=True):
            layer.top_k_owner.top_k = k
        total = 0.0
        for batch in text.ids.split(batch_size):
            ids = batch.to(model.device)
            total += float(nll_sum(logits_of(model, ids), ids))
        return math.exp(total / num_predictions(text.ids))

    matrix = [[0.0] * layer.k_orig for layer in layers]
    value = perplexity()
    for i in reversed(range(len(layers))):
        matrix[i][-1] = value
        for k in range(layers[i].k_orig - 1, 0, -1):
            allocation[i] = k
            value = matrix[i][k - 1] = perplexity()
    return matrix


def run_way(args: argparse.Namespace) -> dict[str, Any]:
    """One way, in this process: its time, its peak memory beyond the model, its matrix."""
    model, text = build(args)
    cuda = args.device.startswith("cuda")
    with torch.no_grad():
        logits_of(model, text.ids[: args.batch_size].to(model.device))  # warm up
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    if args.way == "walk":
        result = allocmoe.profile(model, text, batch_size=args.batch_size)
        matrix = [list(row) for row in result.perplexity]
    else:
        matrix = literal(model, text, args.batch_size)
    if cuda:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": time.perf_counter() - began, "peak_bytes": peak, "matrix": matrix}


def settings(args: argparse.Namespace) -> dict[str, Any]:
    given = {k: v for k, v in vars(args).items() if k not in ("way", "output")}
    if args.shape:  # it brings these of its own
        for name in ("layers", "experts", "top_k", "hidden", "expert_width", "vocabulary", "dtype"):
            del given[name]
    return given


def main() -> None:
    args = parse()
    if args.way:
        print(json.dumps(run_way(args)))
        return
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(args.repeats):
        for way in WAYS:
            command = [sys.executable, *sys.argv, "--way", way]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs[way].append(json.loads(done.stdout.splitlines()[-1]))
            seconds = runs[way][-1]["seconds"]
            print(f"run {number + 1}, {way}: {seconds:.2f} s", file=sys.stderr)
    walk, slow = runs["walk"][0]["matrix"], runs["literal"][0]["matrix"]
    difference = max(
        abs(a / b - 1) for x, y in zip(walk, slow, strict=True) for a, b in zip(x, y, strict=True)
    )
    median = {w: statistics.median(r["seconds"] for r in runs[w]) for w in WAYS}
    result = {
        "benchmark": "profile_cost",
        "settings": settings(args),
        "seconds": {way: [round(r["seconds"], 3) for r in runs[way]] for way in WAYS},
        "peak_mib": {
            way: round(max(r["peak_bytes"] for r in runs[way]) / 2**20, 1) for way in WAYS
        },
        "speedup": round(median["literal"] / median["walk"], 3),
        "largest_relative_difference": difference,
        **provenance(),
    }
    print(json.dumps(result, indent=2))
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
