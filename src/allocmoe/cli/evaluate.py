"""allocmoe eval: what a plan costs in quality."""

from __future__ import annotations

import argparse
from pathlib import Path

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

NAME = "eval"
HELP = "measure plans: perplexity, distance from the unmodified model, what really ran"
EXAMPLE = "allocmoe eval allenai/OLMoE-1B-7B-0924 --plan plan.json --text wikitext2:test"


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
    from allocmoe.evaluation.quality import evaluate
    from allocmoe.models import inspect_model

    plans = {}
    for file in args.plan:
        name = Path(file).stem
        if name in plans:
            raise AllocMoEError(f"two plans are called {name}: rename one of the files")
        plans[name] = Plan.load(file)
    tokenizer = common.load_tokenizer(args)
    info = inspect_model(common.load_model(args, skeleton=True)).info
    for plan in plans.values():
        plan.check_fits(info)
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
        common.load_text(args, tokenizer),
        batch_size=args.batch_size,
        progress=common.make_progress(),
    )
    if args.output:
        result.save(args.output)
    common.console.print(quality_table(result))
    if args.json:
        common.print_json(result.to_json())
