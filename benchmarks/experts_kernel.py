"""The routed experts of one layer: our kernel beside transformers' own, against the floor.

    python benchmarks/experts_kernel.py -o benchmarks/results/experts_kernel_h200.json

One layer at DeepSeek-V2-Lite's shape with random weights and a random router, each way captured in
a CUDA graph with the same routing. The floor is the bytes of the distinct experts over the copy
bandwidth, or the arithmetic over the matrix rate, whichever takes longer; both rates are measured
in the same run. Selection is Alloc-T at half the budget, against the experts alone on the pairs
it chose.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from torch.nn import functional as F
from transformers import DeepseekV2Config
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

from allocmoe.codec import write_json
from allocmoe.kernels.fused.ops import select_op
from allocmoe.runtime.kernel import KERNEL, find_kernel

K_ORIG = 6
CASES = [
    (1, 6), (8, 6), (8, 3), (32, 6), (32, 3), (256, 6), (256, 3), (2048, 6), (2048, 3),
    (8192, 6), (8192, 3), (32768, 6), (32768, 3),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, default=None)
    args = parser.parse_args()
    torch.set_grad_enabled(False)

    module = build()
    module.__dict__[KERNEL] = find_kernel(module)
    copy, matmul = copy_bandwidth(), matmul_rate()
    print(f"copy {copy / 1e12:.2f} TB/s, matrix product {matmul / 1e12:.0f} TFLOP/s")
    rows = [measure(module, T, K, copy, matmul, args.repeats) for T, K in CASES]
    selection = [measure_selection(module, T, args.repeats) for T in (8, 256, 8192)]
    result = {
        "benchmark": "experts_kernel",
        "shape": "deepseek-v2-lite",
        "dtype": "bfloat16",
        "copy_bytes_per_second": round(copy),
        "matmul_flops_per_second": round(matmul),
        "repeats": args.repeats,
        "experts": rows,
        "selection": selection,
        **provenance(),
    }
    if args.output:
        write_json(args.output, result)
    print(json.dumps(selection))


def build() -> Any:
    config = DeepseekV2Config(
        hidden_size=2048, moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = DeepseekV2Experts(config).to(torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return module


def route(T: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(T)
    hidden = torch.randn(T, 2048, device="cuda", generator=generator).bfloat16()
    logits = torch.randn(T, 64, device="cuda", generator=generator)
    weights, index = logits.softmax(-1).topk(K_ORIG, dim=-1)
    return hidden, index[:, :K].contiguous(), weights[:, :K].contiguous(), logits


def measure(
    module: Any, T: int, K: int, copy: float, matmul: float, repeats: int
) -> dict[str, Any]:
    hidden, index, weights, _ = route(T, K)
    kernel = module.__dict__[KERNEL]
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "allocmoe": lambda: kernel.run(module, hidden, index, weights),
        "grouped_mm": lambda: grouped_mm_experts_forward(module, hidden, index, weights),
    }
    # it gathers every pair's weights: gigabytes beyond a few tokens
    if T <= 32:
        ways["batched_mm"] = lambda: batched_mm_experts_forward(module, hidden, index, weights)
    expert = module.gate_up_proj[0].numel() + module.down_proj[0].numel()
    distinct = len(index.unique())
    bytes_us = distinct * expert * 2 / copy * 1e6
    flops_us = T * K * expert * 2 / matmul * 1e6
    floor = max(bytes_us, flops_us)
    times = dict(zip(ways, graph_times(list(ways.values()), repeats), strict=True))
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
        "relative_error": error(module, hidden, index, weights),
    }
    print(
        f"T={T:5d} K={K} distinct {distinct:2d} floor {floor:7.1f} us  ours "
        f"{times['allocmoe']['median']:7.1f} ({row['over_floor']:.2f} x floor)  grouped_mm "
        f"{times['grouped_mm']['median']:7.1f}  error {row['relative_error']:.1e}",
        flush=True,
    )
    return row


def error(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| over up to 64 tokens, the reference in float64."""
    out = module.__dict__[KERNEL].run(module, hidden, index, weights)
    tokens = torch.arange(0, len(hidden), max(1, len(hidden) // 64), device="cuda")[:64]
    reference = torch.zeros(len(tokens), hidden.shape[1], device="cuda", dtype=torch.float64)
    for row, token in enumerate(tokens.tolist()):
        for expert, weight in zip(index[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (module.gate_up_proj[expert].double() @ hidden[token].double()).chunk(2)
            reference[row] += weight * (module.down_proj[expert].double() @ (F.silu(gate) * up))
    difference = out[tokens].double() - reference
    return round(float(difference.norm() / reference.norm()), 6)


def measure_selection(module: Any, T: int, repeats: int) -> dict[str, Any]:
    hidden, index, weights, logits = route(T, K_ORIG)
    kernel = module.__dict__[KERNEL]
    pairs = 3 * T
    row: dict[str, Any] = {"tokens": T}
    plain_hidden, plain_index, plain_weights, _ = route(T, 3)

    def plain() -> torch.Tensor:
        return kernel.run(module, plain_hidden, plain_index, plain_weights)

    for rule in ("pool", "threshold"):
        # the score that half of the pairs exceed
        pool = logits.softmax(-1).topk(K_ORIG, dim=-1).values[:, 1:].flatten()
        threshold = float(pool.sort(descending=True).values[2 * T])
        params = torch.tensor([3.0, threshold], dtype=torch.float64, device="cuda")

        def select(rule: str = rule, params: torch.Tensor = params) -> Any:
            return select_op(
                index, weights, logits, None, None, params, 64, rule, "softmax", "none", 1, 1,
                False, 0,
            )  # fmt: skip

        def both(select: Any = select) -> torch.Tensor:
            return kernel.run(module, hidden, *select(), pairs)

        selected = select()
        chosen = selected[0]

        def alone(selected: Any = selected) -> torch.Tensor:
            return kernel.run(module, hidden, *selected, pairs)

        top, experts, whole = graph_times([plain, alone, both], repeats)
        name = "batch" if rule == "pool" else rule
        row[name] = {
            "pairs": int((chosen < 64).sum()),
            "distinct_experts": len(chosen[chosen < 64].unique()),
            "top_3_us": top,
            "selection_us": graph_time(select, repeats),
            "experts_us": experts,
            "both_us": whole,
            "adds_us": round(whole["median"] - experts["median"], 2),
            "adds": round(whole["median"] / experts["median"] - 1, 4),
        }
        print(
            f"T={T:5d} {name}: {row[name]['pairs']} pairs, experts {experts['median']:.1f} us, "
            f"with selection {whole['median']:.1f} us, plain top-3 {top['median']:.1f} us"
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


def graph_time(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Microseconds of a call: median, least and most of the replays."""
    return graph_times([run], repeats)[0]


def graph_times(
    runs: Sequence[Callable[[], Any]], repeats: int, calls: int = 10
) -> list[dict[str, float]]:
    """The same for several ways that take turns, so that a change of clocks hits all alike."""
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
