"""allocmoe eval: what a plan costs in quality."""

from __future__ import annotations

import argparse
from pathlib import Path

from allocmoe.cli import common

NAME = "eval"
HELP = "measure plans: perplexity, distance from the unmodified model, what really ran"
EXAMPLE = "allocmoe eval reference --plan plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument(
        "--plan",
        action="append",
        required=True,
        metavar="FILE",
        help="a plan; give the option again for more",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the result as JSON")
    common.add_text_arguments(parser, default="builtin:heldout", sequences=16)


def run(args: argparse.Namespace) -> None:
    from allocmoe.artifacts import Plan
    from allocmoe.cli.tables import quality_table
    from allocmoe.codec import check_writable
    from allocmoe.evaluation.quality import evaluate
    from allocmoe.models import inspect_model

    if args.output:
        check_writable(Path(args.output))
    plans = {name: Plan.load(file) for name, file in common.plan_names(args.plan).items()}
    skeleton = common.load_skeleton(args)
    for plan in plans.values():
        plan.check_fits(skeleton.info)
    text = common.load_text(args, common.load_tokenizer(args))
    model = common.load_model(args)
    info = inspect_model(model).info
    for name, plan in plans.items():
        if plan.model.fingerprint not in (None, info.fingerprint):
            common.console.print(
                f"note: {name} was made for other weights of this architecture", style="yellow"
            )
    result = evaluate(
        model,
        plans,
        text,
        batch_size=args.batch_size,
        progress=common.make_progress(),
    )
    common.console.print(quality_table(result))
    if args.output:
        result.save(args.output)
        common.console.print(f"saved in {args.output}")
    if args.json:
        common.print_json(result.to_json())
