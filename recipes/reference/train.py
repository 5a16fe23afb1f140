"""Trains a small Mixture-of-Experts model on prepared tokens and saves a transformers folder.

    python recipes/reference/train.py prepared -o model --minutes 6.2
    python recipes/reference/train.py prepared -o model --preset small-olmoe --minutes 4.5

Warm-up, a constant learning rate, then a linear decay over the last part of the time; a load-
balancing loss; float32 weights, bfloat16 arithmetic on a GPU, saved in bfloat16. The presets are in
sizes.py; every size has an option of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layers import EXPERTS, Routers, balance_loss, reset_layers, set_layers
from sizes import FAMILIES, SIZES, build_config, check
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from allocmoe.artifacts import package_versions
from allocmoe.bench.machine import describe_machine

SAVING_S = 20  # kept free of training, under --limit, to save and to measure

# token ids [B, N] -> loss, load-balancing loss, how often each expert was chosen [L, E]
Losses = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prepared", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--preset", choices=SIZES, default="reference")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="MINUTES",
        help="of the whole run: compiling, training, saving and measuring; may shorten training",
    )
    parser.add_argument("--max-steps", type=int, default=None, help="stop earlier (for trials)")
    sizes = parser.add_argument_group("sizes (the preset's, unless given)")
    sizes.add_argument("--family", choices=FAMILIES)
    sizes.add_argument("--layers", type=int, help="with DeepSeek-V2's first one, which is dense")
    sizes.add_argument("--experts", type=int)
    sizes.add_argument("--top-k", type=int)
    sizes.add_argument("--hidden", type=int)
    sizes.add_argument("--heads", type=int)
    sizes.add_argument("--expert-width", type=int)
    sizes.add_argument("--shared-width", type=int, help="of all shared experts together")
    sizes.add_argument("--dense-width", type=int, help="of DeepSeek-V2's dense layer")
    sizes.add_argument("--latent", type=int, help="rank of DeepSeek-V2's keys and values")
    sizes.add_argument("--tied", action=argparse.BooleanOptionalAction, help="the embeddings")
    sizes.add_argument("--batch", type=int, help="sequences a step")
    sizes.add_argument("--learning-rate", type=float)
    sizes.add_argument("--balance-over", choices=("layer", "model"))
    sizes.add_argument("--experts-impl", choices=EXPERTS, help="while training")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--warmup", type=float, default=0.02, help="share of the time")
    parser.add_argument("--decay", type=float, default=0.4, help="share of the time, at its end")
    parser.add_argument("--balance", type=float, default=0.01, help="of the load-balancing loss")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--passes", type=int, default=1, help="a step's batch is split into")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--log-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    preset = parser.parse_known_args(words)[0].preset
    parser.set_defaults(**SIZES[preset])
    args = parser.parse_args(words)
    if wrong := check(args):
        parser.error(wrong)
    return args


def learning_rate(args: argparse.Namespace, progress: float) -> float:
    rise = min(1.0, progress / args.warmup)
    fall = min(1.0, max(0.0, 1 - progress) / args.decay)
    return args.learning_rate * min(rise, fall)


def load_tokens(path: Path, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype("i4")).to(device)


def batches(tokens: torch.Tensor, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Random windows, every part of the text about equally often; the same for the same seed."""
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        starts = torch.randint(0, len(tokens) - args.length, (args.batch,), generator=generator)
        rows = starts[:, None] + torch.arange(args.length)
        yield tokens[rows.to(tokens.device)].long()


def build_model(args: argparse.Namespace, vocabulary: int, device: torch.device) -> Any:
    torch.manual_seed(args.seed)
    config = build_config(args, vocabulary)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device).train()


def build_losses(model: Any, args: argparse.Namespace, *, half: bool) -> Losses:
    """half: the arithmetic in bfloat16."""
    routers = Routers(model)
    kind = model.device.type

    def losses(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routers.seen.clear()  # what a failed attempt left
        with torch.autocast(kind, torch.bfloat16, enabled=half):
            out = model(ids, labels=ids, use_cache=False)
        chosen, scores = routers.take()
        return out.loss, balance_loss(chosen, scores, args.balance_over), chosen.detach()

    return losses


def build_optimizer(model: Any, args: argparse.Namespace) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": vectors, "weight_decay": 0},
        ],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
        fused=model.device.type == "cuda",
    )


def backward(
    losses: Losses, ids: torch.Tensor, args: argparse.Namespace, passes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a step; the means of loss, balance and choices over its passes."""
    seen = []
    for part in ids.chunk(passes):
        loss, balance, chosen = losses(part)
        ((loss + args.balance * balance) / passes).backward()
        seen.append((loss.detach(), balance.detach(), chosen))
    loss, balance, chosen = (torch.stack(values).mean(0) for values in zip(*seen, strict=True))
    return loss, balance, chosen


def ways(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """To compute a step, the likely quickest first; more passes are for who runs out of memory."""
    wanted = args.compile if args.compile is not None else device.type == "cuda"
    for compiled in (True, False) if wanted else (False,):
        for impl in dict.fromkeys((args.experts_impl, "dense")):
            for passes in (args.passes, 2 * args.passes, 4 * args.passes):
                yield {"experts_impl": impl, "compiled": compiled, "passes": passes}


def attempt(
    model: Any, losses: Losses, ids: torch.Tensor, args: argparse.Namespace, way: dict[str, Any]
) -> Losses:
    """One step without an update; raises if the way does not work."""
    torch._dynamo.reset()
    set_layers(model, way["experts_impl"])
    step: Losses = torch.compile(losses) if way["compiled"] else losses
    backward(step, ids, args, way["passes"])
    if not all(_is_finite(p.grad) for p in model.parameters()):
        raise ArithmeticError("gradients are not finite")
    return step


def working_step(
    model: Any, losses: Losses, ids: torch.Tensor, args: argparse.Namespace
) -> tuple[Losses, dict[str, Any]]:
    failure: Exception | None = None
    for way in ways(args, model.device):
        if way["passes"] > args.passes and not isinstance(failure, torch.OutOfMemoryError):
            continue
        try:
            return attempt(model, losses, ids, args, way), way
        except Exception as error:  # whatever a compiler may throw: there is another way
            first = (str(error).splitlines() or [""])[0]
            print(f"{way} failed: {type(error).__name__}: {first}", flush=True)
            failure = error.with_traceback(None)  # which would keep its tensors
        finally:
            model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    assert failure is not None
    raise failure


def train(
    model: Any,
    losses: Losses,
    source: Iterator[torch.Tensor],
    args: argparse.Namespace,
    *,
    seconds: float,
    passes: int = 1,
    log: Callable[[dict[str, Any]], None] = lambda entry: None,
) -> tuple[int, float]:
    """Steps until the time or --max-steps is up; how many, and the seconds they took."""
    optimizer = build_optimizer(model, args)
    began, step, skipped = time.perf_counter(), 0, 0
    # parameters whose gradients were not finite, and how often
    broken: Counter[str] = Counter()
    while True:
        elapsed = time.perf_counter() - began
        progress = elapsed / seconds
        if args.max_steps is not None:
            progress = max(progress, step / args.max_steps)
        if progress >= 1:
            return step, elapsed
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, progress)
        loss, balance, chosen = backward(losses, next(source), args, passes)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # reading the norm waits for the step, so that the clock counts what is done
        if math.isfinite(norm.item()):
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            optimizer.step()
        else:
            skipped += 1
            broken.update(n for n, p in model.named_parameters() if not _is_finite(p.grad))
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0:
            log(
                {
                    "step": step,
                    "loss": float(loss),
                    "balance": float(balance),
                    # the busiest expert of all layers; 1 is an even load
                    "busiest": float(chosen.max()) * chosen.shape[1] / args.top_k,
                    "norm": float(norm),
                    "skipped": skipped,
                    "broken": dict(broken.most_common(5)),
                    "seconds": round(elapsed, 3),
                }
            )
        step += 1


def _is_finite(gradient: torch.Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())


@torch.no_grad()
def evaluate(
    model: Any, tokens: torch.Tensor, length: int, deadline: float = math.inf
) -> tuple[float, int]:
    """Mean loss in nats a token over consecutive windows, until the deadline; windows read."""
    rows = tokens[: len(tokens) // length * length].view(-1, length).long()
    total, seen = 0.0, 0
    for batch in rows.split(64):
        if time.perf_counter() > deadline:
            break
        logits = model(batch, use_cache=False).logits[:, :-1].float()
        total += float(
            F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        )
        seen += len(batch)
    return total / max(1, seen * (length - 1)), seen


def save(model: Any, args: argparse.Namespace) -> None:
    reset_layers(model)
    model.eval().to(torch.bfloat16).save_pretrained(args.output)
    for file in (args.prepared / "tokenizer").iterdir():
        shutil.copy(file, args.output)


def measure(
    args: argparse.Namespace, facts: dict[str, Any], device: torch.device, deadline: float
) -> dict[str, Any]:
    """Of the folder as saved, on the held-out text."""
    saved = AutoModelForCausalLM.from_pretrained(args.output).to(device).eval()
    loss, windows = evaluate(
        saved, load_tokens(args.prepared / "val.bin", device), args.length, deadline
    )
    if not windows:
        return {"val_windows": 0}
    bytes_a_token = facts["val_bytes"] / facts["val_tokens"]
    return {
        "val_loss": loss,
        "val_perplexity": math.exp(loss),
        "val_bits_per_byte": loss / math.log(2) / bytes_a_token,
        "val_windows": windows,
    }


def count_parameters(model: Any, args: argparse.Namespace) -> dict[str, int]:
    """All, and those that one token uses: k of the experts, and of the embeddings the output's."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    unused = 0 if args.tied else model.get_input_embeddings().weight.numel()
    active = total - experts + experts * args.top_k // args.experts - unused
    return {"parameters": total, "active_parameters": active}


def main() -> None:
    started = time.perf_counter()
    args = parse()
    deadline = started + 60 * args.limit if args.limit else math.inf
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = json.loads((args.prepared / "facts.json").read_text())
    vocabulary = len(
        json.loads((args.prepared / "tokenizer/tokenizer.json").read_text())["model"]["vocab"]
    )
    model = build_model(args, vocabulary, device)
    source = batches(load_tokens(args.prepared / "train.bin", device), args)
    # compile before the clock starts
    losses = build_losses(model, args, half=device.type == "cuda")
    losses, way = working_step(model, losses, next(source), args)
    ready = time.perf_counter()
    seconds = min(60 * args.minutes, deadline - ready - SAVING_S)
    if seconds <= 0:
        raise SystemExit(f"--limit is up before training: {ready - started:.0f} s to start")
    args.output.mkdir(parents=True, exist_ok=True)
    curve: list[dict[str, Any]] = []
    with (args.output / "log.jsonl").open("w") as file:

        def log(entry: dict[str, Any]) -> None:
            curve.append(entry)
            for stream in (sys.stdout, file):
                print(json.dumps(entry), file=stream, flush=True)

        steps, took = train(
            model, losses, source, args, seconds=seconds, passes=way["passes"], log=log
        )
    counts = count_parameters(model, args)
    save(model, args)
    settings = {k: v for k, v in vars(args).items() if k not in ("prepared", "output")}
    result = {
        **counts,
        "steps": steps,
        "tokens": steps * args.batch * args.length,
        "seconds": round(took, 1),
        "seconds_to_start": round(ready - started, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "machine": dataclasses.asdict(describe_machine(device)),
        "versions": package_versions(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "way": way,
        "settings": settings,
        "data": facts,
        "log": curve[:: max(1, len(curve) // 50)],
    }
    if device.type == "cuda":
        result["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    if (args.prepared / "val.bin").exists():
        result |= measure(args, facts, device, deadline)
    (args.output / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("log", "data")}), flush=True)


if __name__ == "__main__":
    main()
