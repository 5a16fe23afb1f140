"""allocmoe compare: every method at several budgets."""

from __future__ import annotations

import argparse
from pathlib import Path

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

NAME = "compare"
HELP = "run all methods at several budgets on one model, into one JSON and one table"
EXAMPLE = "allocmoe compare allenai/OLMoE-1B-7B-0924 --budgets 75%,50%,25% -o compare.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument(
        "--budgets", type=common.word_list, default=["75%", "50%"], help="default 75%%,50%%"
    )
    parser.add_argument(
        "--methods", type=common.word_list, metavar="NAME,...", help="default: all of them"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        required=True,
        help="the result as JSON; the table goes beside it as .md",
    )
    parser.add_argument(
        "--sensitivity", metavar="FILE", help="use this instead of profiling in the context paper"
    )
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted profile")
    common.add_rule_arguments(parser)
    common.add_text_arguments(parser)
    common.add_eval_text_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from allocmoe.artifacts import Sensitivity
    from allocmoe.cli.tables import quality_markdown, quality_table
    from allocmoe.codec import write_text
    from allocmoe.models import inspect_model
    from allocmoe.planning.compare import compare
    from allocmoe.planning.methods import METHODS, NEEDS_SENSITIVITY, Planner
    from allocmoe.profiling.profile import profile
    from allocmoe.solver import parse_budget

    methods = args.methods or list(METHODS)
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        raise AllocMoEError(f"unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    output = Path(args.output)
    kept = output.with_name(f"{output.stem}-sensitivity.json")
    args.interrupted_hint = f"a finished part of the profile is in {kept}.partial, use --resume"
    sensitivity = Sensitivity.load(args.sensitivity) if args.sensitivity else None
    tokenizer = common.load_tokenizer(args)
    model = common.load_model(args)
    info = inspect_model(model).info
    for budget in args.budgets:
        parse_budget(budget, info.k_orig)
    text, eval_text = common.load_text_pair(args, tokenizer)
    progress = common.make_progress()
    if sensitivity is None and NEEDS_SENSITIVITY & set(methods):
        sensitivity = profile(
            model,
            text,
            batch_size=args.batch_size,
            save_to=kept,
            resume=args.resume,
            progress=progress,
        )
    planner = Planner(
        info,
        model=model,
        text=text,
        sensitivity=sensitivity,
        scope=args.scope,
        k_base=args.k_base,
        batch_size=args.batch_size,
        progress=progress,
    )
    result, _ = compare(model, planner, eval_text, args.budgets, methods=methods, progress=progress)
    result.save(output)
    write_text(output.with_suffix(".md"), quality_markdown(result))
    common.console.print(quality_table(result))
    common.console.print(f"saved in {output} and {output.with_suffix('.md')}")
    if args.json:
        common.print_json(result.to_json())
