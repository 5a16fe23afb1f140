"""Plans inside vLLM: prefill and decode against stock vLLM, each in an engine of its own.

A group of engines stands on the GPU at once and is timed in turns, round by round: what disturbs
the machine meets all of them. Compare inside a group.

    python benchmarks/vllm_decode.py -o benchmarks/results/vllm_deepseek_v2_lite_h200.json
    python benchmarks/vllm_decode.py --layers 3 --batch 2 --runs 1 --warmups 0 --eager    # smoke

DeepSeek-V2-Lite's shape with random weights, CUDA graphs and torch.compile on. Prefill is the time
to the first token of a batch; decode is what every further token adds to it. Layer budgets at half
the activations fall from layer to layer, as a profile's would not be uniform either; thresholds are
set for the scores that such a random router gives.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from allocmoe import routing
from allocmoe.artifacts import Plan, TokenRule
from allocmoe.codec import write_json
from allocmoe.models import inspect_model
from allocmoe.models.shapes import SHAPES, build_shape
from allocmoe.planning.methods import make_plan

SHAPE = "deepseek-v2-lite"
ROUTER_STD = 0.02
READY, RESULT = "READY", "RESULT "
GROUPS = "original,uniform,layers/uniform,alloc-t batch,alloc-t threshold"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", default=GROUPS, help="about 40 GiB for an entry of a group")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--long-prompt", type=int, default=2048)
    parser.add_argument("--warmups", type=int, default=5)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--capture", default="1,2,4,8,16,32,64,128,256", help="CUDA graph sizes")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a group")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--entry", help=argparse.SUPPRESS)
    return parser.parse_args()


def half(entry: str, layers: int | None) -> Plan:
    """The plan of an entry, at half of the activations."""
    skeleton = build_shape(SHAPE, layers=layers, device="meta")
    if entry == "layers":
        return make_plan("descending", "50%", model=skeleton)
    plan = make_plan("alloc-t", "50%", model=skeleton)
    if entry == "alloc-t batch":
        return plan
    info = inspect_model(skeleton).info
    hidden = SHAPES[SHAPE][1]["hidden_size"]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20000, info.num_experts[0], generator=generator) * ROUTER_STD * hidden**0.5
    scores = logits.softmax(-1).topk(info.k_orig[0], dim=-1).values
    thresholds = tuple(routing.calibrate_threshold(scores, b) for b in plan.layer_budgets)
    return replace(plan, token=TokenRule("alloc-t", "threshold", 1, thresholds))


def reinit(model: Any) -> int:
    """Norms at 1 and routers at random: vLLM's dummy weights would route every token alike."""
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith("gate.weight"):
                parameter.normal_(0.0, ROUTER_STD)
            elif "embed_tokens" in name:
                # far above the norms' epsilon
                parameter.normal_(0.0, 1.0)
    return 0


def run_entry(args: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    family, settings = SHAPES[SHAPE]
    config = {
        **settings,
        "model_type": family,
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_hidden_layers": args.layers or settings["num_hidden_layers"],
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    longest = max(args.prompt + args.decode + 1, args.long_prompt + 1)
    options: dict[str, Any] = dict(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest,
        max_num_batched_tokens=max(2048, args.batch * args.long_prompt),
        gpu_memory_utilization=0.25,
        # given, lest engines that start side by side count each other's memory
        kv_cache_memory_bytes=4 << 30,
        enable_prefix_caching=False,
        enforce_eager=args.eager,
        compilation_config={"cudagraph_capture_sizes": [int(n) for n in args.capture.split(",")]},
        seed=0,
    )
    plan = None
    if args.entry == "uniform":
        options["hf_overrides"] = {"num_experts_per_tok": settings["num_experts_per_tok"] // 2}
    elif args.entry != "original":
        plan = half(args.entry, args.layers)
        options["additional_config"] = {"allocmoe": {"plan": plan.to_json()}}
        options["worker_extension_cls"] = "allocmoe.runtime.vllm.worker.WorkerExtension"
    began = time.perf_counter()
    llm = LLM(**options)
    started = time.perf_counter() - began
    llm.apply_model(reinit)
    if plan is not None:
        # the dummy steps of the start do not count
        llm.collective_rpc("allocmoe_reset")

    def prompts(length: int) -> list[dict[str, list[int]]]:
        draw = random.Random(1)
        top = config["vocab_size"] - 3000
        return [
            {"prompt_token_ids": [draw.randrange(1000, top) for _ in range(length)]}
            for _ in range(args.batch)
        ]

    def seconds(length: int, tokens: int) -> float:
        wanted = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        llm.generate(prompts(length), wanted, use_tqdm=False)
        return time.perf_counter() - began

    times: dict[str, list[float]] = {"prefill_ms": [], "decode_ms": [], "long_prefill_ms": []}
    for number in range(args.warmups + args.runs):
        print(READY, flush=True)
        sys.stdin.readline()  # until it is this engine's turn
        # short, and at the mercy of the processor
        first = statistics.median(seconds(args.prompt, 1) for _ in range(10))
        whole = seconds(args.prompt, args.decode + 1)
        long = seconds(args.long_prompt, 1)
        if number >= args.warmups:
            times["prefill_ms"].append(1e3 * first)
            times["decode_ms"].append(1e3 * (whole - first) / args.decode)
            times["long_prefill_ms"].append(1e3 * long)
    result: dict[str, Any] = {"entry": args.entry, "start_s": round(started, 1)}
    for name, values in times.items():
        result[name] = {
            "median": round(statistics.median(values), 4),
            "min": round(min(values), 4),
            "max": round(max(values), 4),
        }
    if plan is not None:
        status = llm.collective_rpc("allocmoe_status")[0]
        ran = [layer for layer in status["layers"].values() if layer["tokens"]]
        # layers without a token rule run their budget by construction and do not count
        result["realised"] = [
            round(layer["activations"] / layer["tokens"], 4) for layer in ran
        ] or "by top-k"
    return result


def be_entry(args: argparse.Namespace) -> None:
    # what it does when the time is up
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    code = 1
    try:
        print(RESULT + json.dumps(run_entry(args)), flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    # vLLM's threads may not end
    sys.stderr.flush()
    os._exit(code)


def start(entry: str) -> subprocess.Popen[str]:
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
    }
    return subprocess.Popen(
        [sys.executable, *sys.argv, "--entry", entry],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


class Engine:
    """A process with an engine, whose output is read as it comes, lest it waits for a reader."""

    def __init__(self, entry: str) -> None:
        self.entry, self.lines = entry, list[str]()
        self.process = start(entry)
        self.ready = threading.Semaphore(0)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(READY):
                self.ready.release()
        self.ready.release()  # it ended

    def play(self) -> None:
        """One round, if it lives."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        self.ready.acquire()

    def result(self) -> dict[str, Any] | None:
        """What it timed; None if it failed."""
        self.process.wait()
        self.reader.join()
        found = [line for line in self.lines if line.startswith(RESULT)]
        return json.loads(found[-1].removeprefix(RESULT)) if found else None


def measure(engines: list[Engine], rounds: int) -> None:
    for engine in engines:
        engine.ready.acquire()
    for number in range(rounds):
        # who comes first changes, lest one always follows the same
        turn = number % len(engines)
        for engine in engines[turn:] + engines[:turn]:
            if engine.process.poll() is None:
                engine.play()


def main() -> None:
    args = parse()
    if args.entry:
        be_entry(args)
    rows, failed = [], []
    for number, group in enumerate(args.groups.split("/")):
        engines = [Engine(entry) for entry in group.split(",")]
        measure(engines, args.warmups + args.runs)
        for engine in engines:
            row = engine.result()
            if row is None:
                # the entries before and after it are worth having
                print(f"{engine.entry} failed:", *engine.lines[-80:], file=sys.stderr, flush=True)
                failed.append(engine.entry)
                continue
            rows.append({"group": number, **row})
            print(json.dumps(rows[-1]), flush=True)
        result = {
            "benchmark": "vllm_decode",
            "shape": SHAPE,
            "settings": {k: v for k, v in vars(args).items() if k not in ("entry", "output")},
            "rows": rows,
            "failed": failed,
            "vllm": version("vllm"),
            **provenance(),
        }
        if args.output:
            write_json(args.output, result)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
