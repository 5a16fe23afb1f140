"""The routed experts of one layer: our kernel beside transformers' own, against the floor.

    python benchmarks/experts_kernel.py --shape gpt-oss-20b -o result.json

One layer with random weights and a random router, each way captured in a CUDA graph with the same
routing. The floor is the bytes of the distinct experts over the copy
bandwidth, or the arithmetic over the matrix rate, whichever takes longer; both rates are measured
in the same run. Selection is Alloc-T at half the budget, against the experts alone on the pairs
it chose.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

from allocmoe.codec import write_json
from allocmoe.kernels import compact
from allocmoe.kernels.fused.ops import select_op
from allocmoe.kernels.reference import run_experts_reference
from allocmoe.models import MoELayer, inspect_model
from allocmoe.models.shapes import SHAPES, build_shape
from allocmoe.runtime.kernel import find_kernel

TOKENS = "1,8,32,256,2048,8192,32768"
SELECTED = (8, 256, 8192)
# transformers' batched_mm gathers the weights of every pair
MOST_GATHERED = 4e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="deepseek-v2-lite", choices=SHAPES)
    parser.add_argument("--tokens", default=TOKENS, help=f"default {TOKENS}")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, default=None)
    args = parser.parse_args()
    torch.set_grad_enabled(False)

    tokens = [int(T) for T in args.tokens.split(",")]
    bench = Bench(build(args.shape), copy_bandwidth(), matmul_rate(), args.repeats)
    print(f"copy {bench.copy / 1e12:.2f} TB/s, matrix product {bench.matmul / 1e12:.0f} TFLOP/s")
    ks = (bench.layer.k_orig, bench.layer.k_orig // 2)
    rows = [bench.measure(T, K) for T in tokens for K in ks]
    selection = [bench.measure_selection(T) for T in tokens if T in SELECTED]
    result = {
        "benchmark": "experts_kernel",
        "shape": args.shape,
        "dtype": "bfloat16",
        "copy_bytes_per_second": round(bench.copy),
        "matmul_flops_per_second": round(bench.matmul),
        "repeats": args.repeats,
        "experts": rows,
        "selection": selection,
        **provenance(),
    }
    if args.output:
        write_json(args.output, result)
    print(json.dumps(selection))


def build(shape: str) -> MoELayer:
    """The first MoE layer of the shape."""
    layers = SHAPES[shape][1].get("first_k_dense_replace", 0) + 1
    return inspect_model(build_shape(shape, layers=layers, device="cuda")).layers[0]


class Bench:
    """One layer, the rates that its floor is made of, and how often to time."""

    def __init__(self, layer: MoELayer, copy_: float, matmul: float, repeats: int) -> None:
        self.layer, self.copy, self.matmul, self.repeats = layer, copy_, matmul, repeats
        self.module: Any = layer.experts
        self.exact = copy.deepcopy(self.module).double()
        self.kernel: Any = find_kernel(self.module)
        each = [p.numel() // layer.num_experts for p in self.module.parameters()]
        self.numbers_per_expert = sum(each)

    def route(
        self, T: int, K: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(T)
        width = self.module.config.hidden_size
        hidden = torch.randn(T, width, device="cuda", generator=generator).bfloat16()
        logits = torch.randn(T, self.layer.num_experts, device="cuda", generator=generator)
        weights, index = logits.softmax(-1).topk(self.layer.k_orig, dim=-1)
        return hidden, index[:, :K].contiguous(), weights[:, :K].contiguous(), logits

    def measure(self, T: int, K: int) -> dict[str, Any]:
        hidden, index, weights, _ = self.route(T, K)
        module, numbers = self.module, self.numbers_per_expert
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "allocmoe": lambda: self.kernel.run(module, hidden, index, weights),
            "grouped_mm": lambda: grouped_mm_experts_forward(module, hidden, index, weights),
        }
        if T * K * numbers * 2 <= MOST_GATHERED:
            ways["batched_mm"] = lambda: batched_mm_experts_forward(module, hidden, index, weights)
        distinct = len(index.unique())
        bytes_us = distinct * numbers * 2 / self.copy * 1e6
        flops_us = T * K * numbers * 2 / self.matmul * 1e6
        floor = max(bytes_us, flops_us)
        times = dict(zip(ways, graph_times(list(ways.values()), self.repeats), strict=True))
        row = {
            "tokens": T,
            "k": K,
            "distinct_experts": distinct,
            "floor_us": round(floor, 1),
            "bound_by": "bytes" if bytes_us >= flops_us else "arithmetic",
            **{f"{name}_us": time for name, time in times.items()},
            "over_floor": round(times["allocmoe"]["median"] / floor, 3),
            "speedup_over_grouped_mm": round(
                times["grouped_mm"]["median"] / times["allocmoe"]["median"], 3
            ),
            "relative_error": self.error(hidden, index, weights),
        }
        print(
            f"T={T:5d} K={K} distinct {distinct:3d} floor {floor:7.1f} us  ours "
            f"{times['allocmoe']['median']:7.1f} ({row['over_floor']:.2f} x floor)  grouped_mm "
            f"{times['grouped_mm']['median']:7.1f}  error {row['relative_error']:.1e}",
            flush=True,
        )
        return row

    def error(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> float:
        """||out - reference|| / ||reference|| over up to 64 tokens, the experts in float64."""
        out = self.kernel.run(self.module, hidden, index, weights)
        some = torch.arange(0, len(hidden), max(1, len(hidden) // 64), device="cuda")[:64]
        index = index[some]
        pairs = compact(index, weights[some].double(), torch.ones_like(index, dtype=torch.bool))
        exact = run_experts_reference(self.exact, hidden[some].double(), pairs, len(some))
        return round(float((out[some].double() - exact).norm() / exact.norm()), 6)

    def measure_selection(self, T: int) -> dict[str, Any]:
        """Alloc-T at half the budget, and plain top-k of the same size."""
        k, num_experts = self.layer.k_orig, self.layer.num_experts
        half = k // 2
        hidden, index, weights, logits = self.route(T, k)
        plain_hidden, plain_index, plain_weights, _ = self.route(T, half)
        row: dict[str, Any] = {"tokens": T}

        def plain() -> torch.Tensor:
            return self.kernel.run(self.module, plain_hidden, plain_index, plain_weights)

        for rule in ("pool", "threshold"):
            # the score that as many pairs exceed as the budget leaves after a token's first
            pool = logits.softmax(-1).topk(k, dim=-1).values[:, 1:].flatten()
            threshold = float(pool.sort(descending=True).values[(half - 1) * T])
            params = torch.tensor([half, threshold], dtype=torch.float64, device="cuda")

            def select(rule: str = rule, params: torch.Tensor = params) -> Any:
                return select_op(
                    index, weights, logits, None, None, params, num_experts, rule, "softmax",
                    "none", 1, 1, False, 0,
                )  # fmt: skip

            def both(select: Any = select) -> torch.Tensor:
                return self.kernel.run(self.module, hidden, *select(), half * T)

            selected = select()
            chosen = selected[0][selected[0] < num_experts]

            def alone(selected: Any = selected) -> torch.Tensor:
                return self.kernel.run(self.module, hidden, *selected, half * T)

            top, experts, whole, selection = graph_times([plain, alone, both, select], self.repeats)
            name = "batch" if rule == "pool" else rule
            row[name] = {
                "pairs": len(chosen),
                "distinct_experts": len(chosen.unique()),
                "top_k_us": top,
                "selection_us": selection,
                "experts_us": experts,
                "both_us": whole,
                "adds_us": round(whole["median"] - experts["median"], 2),
                "adds": round(whole["median"] / experts["median"] - 1, 4),
            }
            print(
                f"T={T:5d} {name}: {len(chosen)} pairs, experts {experts['median']:.1f} us, with "
                f"selection {whole['median']:.1f} us, plain top-{half} {top['median']:.1f} us"
            )
        return row


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.randn(2**30, device="cuda").view(torch.bfloat16)
    target = torch.empty_like(source)
    seconds = statistics.median(event_times(lambda: target.copy_(source), 20)) / 1e3
    return 2 * source.numel() * 2 / seconds


def matmul_rate() -> float:
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    b = torch.randn(8192, 8192, device="cuda").bfloat16()
    seconds = statistics.median(event_times(lambda: a @ b, 20)) / 1e3
    return 2 * 8192**3 / seconds


def event_times(run: Callable[[], Any], repeats: int, warm_ups: int = 3) -> list[float]:
    """Milliseconds of each of `repeats` runs, after some that do not count."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for _ in range(warm_ups):
        run()
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def graph_times(
    runs: Sequence[Callable[[], Any]], repeats: int, calls: int = 10
) -> list[dict[str, float]]:
    """Microseconds of a call: median, least and most of the replays. The ways take turns, so that a
    change of clocks hits all alike."""
    graphs = [capture(run, calls) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for graph, own in zip(graphs, times, strict=True):
            own += [1e3 * ms / calls for ms in event_times(graph.replay, 1, warm_ups=1)]
    return [
        {
            "median": round(statistics.median(own), 2),
            "min": round(min(own), 2),
            "max": round(max(own), 2),
        }
        for own in times
    ]


def capture(run: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    """`calls` calls in one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    return graph


if __name__ == "__main__":
    main()
