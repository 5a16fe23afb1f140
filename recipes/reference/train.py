"""Trains a small OLMoE on prepared tokens and saves it as an ordinary transformers folder.

    python recipes/reference/train.py prepared -o model --minutes 6

Warm-up, a constant learning rate, then a linear decay over the last part of the time; the load-
balancing loss of OLMoE; float32 weights, bfloat16 arithmetic on a GPU, saved in bfloat16. All
experts are computed densely while training: here one large product beats sorting tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM
from transformers.integrations.moe import ExpertsInterface


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prepared", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="of training")
    parser.add_argument("--max-steps", type=int, default=None, help="stop earlier (for trials)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--expert-width", type=int, default=48)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256, help="sequences a step")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=float, default=0.02, help="share of the time")
    parser.add_argument("--decay", type=float, default=0.4, help="share of the time, at its end")
    parser.add_argument("--balance", type=float, default=0.01, help="of the load-balancing loss")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def dense_experts(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Every expert for every token, then the routing weights: zero for those not chosen."""
    E, twice, H = module.gate_up_proj.shape
    full = torch.zeros(hidden.shape[0], E, dtype=weights.dtype, device=weights.device)
    full = full.scatter(1, index, weights)
    up = F.linear(hidden, module.gate_up_proj.reshape(E * twice, H)).view(-1, E, twice)
    gate, value = up.chunk(2, dim=-1)
    mixed = module.act_fn(gate) * value * full[..., None].to(up.dtype)
    down = module.down_proj.permute(0, 2, 1).reshape(E * (twice // 2), H)
    return mixed.flatten(1) @ down.to(mixed.dtype)


def learning_rate(args: argparse.Namespace, progress: float) -> float:
    rise = min(1.0, progress / args.warmup)
    fall = min(1.0, max(0.0, 1 - progress) / args.decay)
    return args.learning_rate * min(rise, fall)


def batches(tokens: torch.Tensor, args: argparse.Namespace, generator: torch.Generator) -> Any:
    """Random windows, every part of the text about equally often."""
    while True:
        starts = torch.randint(0, len(tokens) - args.length, (args.batch,), generator=generator)
        rows = starts[:, None] + torch.arange(args.length)
        yield tokens[rows.to(tokens.device)].long()


@torch.no_grad()
def evaluate(model: Any, tokens: torch.Tensor, length: int) -> float:
    """Mean loss in nats a token over consecutive windows."""
    rows = tokens[: len(tokens) // length * length].view(-1, length).long()
    total = 0.0
    for batch in rows.split(64):
        logits = model(batch).logits[:, :-1].float()
        total += float(
            F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        )
    return total / (rows.shape[0] * (length - 1))


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = json.loads((args.prepared / "facts.json").read_text())
    tokens = torch.from_numpy(
        np.fromfile(args.prepared / "train.bin", dtype=np.uint16).astype("i4")
    )
    tokens = tokens.to(device)
    vocabulary = len(
        json.loads((args.prepared / "tokenizer/tokenizer.json").read_text())["model"]["vocab"]
    )
    config = OlmoeConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.expert_width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=False,
        max_position_embeddings=2 * args.length,
        router_aux_loss_coef=args.balance,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = OlmoeForCausalLM(config).to(device)
    ExpertsInterface.register("dense", dense_experts)
    model.set_experts_implementation("dense")
    num_parameters = sum(p.numel() for p in model.parameters())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": vectors, "weight_decay": 0},
        ],
        lr=args.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )

    def losses(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model(ids, labels=ids, output_router_logits=True, use_cache=False)
        return out.loss, out.aux_loss

    compiled = torch.compile(losses) if device.type == "cuda" else losses
    source = batches(tokens, args, torch.Generator().manual_seed(args.seed))
    try:
        compiled(next(source))[0].backward()  # compile before the clock starts
    except torch._dynamo.exc.TorchDynamoException as error:
        print(f"not compiled: {error}", flush=True)
        compiled = losses
    optimizer.zero_grad(set_to_none=True)

    model.train()
    began, step, log = time.perf_counter(), 0, []
    while True:
        elapsed = time.perf_counter() - began
        progress = elapsed / (60 * args.minutes)
        if args.max_steps is not None:
            progress = max(progress, step / args.max_steps)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, progress)
        loss, balance = compiled(next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            entry = {
                "step": step,
                "loss": float(loss),
                "balance": float(balance),
                "seconds": elapsed,
            }
            log.append(entry)
            print(json.dumps(entry), flush=True)
        step += 1
    seconds = time.perf_counter() - began

    model.eval()
    model.set_experts_implementation("grouped_mm")
    args.output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.output)
    for file in (args.prepared / "tokenizer").iterdir():
        shutil.copy(file, args.output)
    result = {
        "parameters": num_parameters,
        "steps": step,
        "tokens": step * args.batch * args.length,
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "settings": {k: v for k, v in vars(args).items() if k not in ("prepared", "output")},
        "data": facts,
        "log": log[:: max(1, len(log) // 50)],
    }
    if (args.prepared / "val.bin").exists():
        held = torch.from_numpy(
            np.fromfile(args.prepared / "val.bin", dtype=np.uint16).astype("i4")
        )
        saved = AutoModelForCausalLM.from_pretrained(args.output).to(device)
        loss = evaluate(saved, held.to(device), args.length)
        result["val_loss"] = loss
        result["val_perplexity"] = math.exp(loss)
        result["val_bits_per_byte"] = loss / math.log(2) * facts["val_tokens"] / facts["val_bytes"]
    (args.output / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("log", "data")}), flush=True)


if __name__ == "__main__":
    main()
