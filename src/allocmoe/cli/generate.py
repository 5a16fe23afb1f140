"""allocmoe generate: try a plan on a prompt."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

NAME = "generate"
HELP = "continue a prompt with a plan applied, and count what ran"
EXAMPLE = 'allocmoe generate reference --plan plan.json --prompt "Once upon a time"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--plan", metavar="FILE", help="without one, the unmodified model runs")
    parser.add_argument("--prompt", required=True, action="append", help="again for a batch")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default 64")


def run(args: argparse.Namespace) -> None:
    import torch
    from transformers import StoppingCriteriaList

    from allocmoe.artifacts import Plan, TokenRule
    from allocmoe.cli.tables import activity_table
    from allocmoe.models import inspect_model
    from allocmoe.runtime.hf import Controller, apply
    from allocmoe.text import check_ids

    if args.max_new_tokens < 1:
        raise AllocMoEError(f"--max-new-tokens must be 1 or more, not {args.max_new_tokens}")
    plan = Plan.load(args.plan) if args.plan else None
    skeleton = common.load_skeleton(args)
    if plan is not None:
        plan.check_fits(skeleton.info)
    tokenizer = common.load_tokenizer(args)
    if not all(tokenizer(prompt).input_ids for prompt in args.prompt):
        raise AllocMoEError("a prompt is empty: give it at least one token")
    # a batch is padded on the left, so that every sequence ends where the new token begins
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    inputs = tokenizer(args.prompt, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    check_ids(skeleton.model, inputs["input_ids"])
    model = common.load_model(args)
    if plan is not None:
        common.note_other_weights({args.plan: plan}, inspect_model(model).info)
    inputs = inputs.to(model.get_input_embeddings().weight.device)  # type: ignore[operator]
    controlled = (
        Controller(inspect_model(model), TokenRule()) if plan is None else apply(model, plan)
    )
    began = time.perf_counter()
    bar = common.make_progress().bar("generate", args.max_new_tokens)
    with controlled as controller, torch.no_grad(), bar as told:

        def count(ids_BS: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            told.advance(1, f"{ids_BS.shape[1]} tokens so far")
            return torch.zeros(len(ids_BS), dtype=torch.bool, device=ids_BS.device)

        output = model.generate(  # type: ignore[operator]
            **inputs,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            # asked after every token whether it was the last one
            stopping_criteria=StoppingCriteriaList([count]),
        )
        activity = controller.activity()
    seconds = time.perf_counter() - began
    new = output[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    if not args.json:
        for prompt, text in zip(args.prompt, texts, strict=True):
            print(prompt + text)
    common.console.print(activity_table(activity))
    common.console.print(f"{new.numel() / seconds:.1f} tokens/s")
    if args.json:
        common.print_json(
            {
                "prompts": args.prompt,
                "texts": texts,
                "activity": [asdict(layer) for layer in activity],
                "tokens_per_second": new.numel() / seconds,
            }
        )
