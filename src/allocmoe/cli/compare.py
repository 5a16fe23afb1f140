"""allocmoe compare: every method at several budgets."""

from __future__ import annotations

import argparse
from pathlib import Path

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

NAME = "compare"
HELP = "run all methods at several budgets on one model, into one JSON and one table"
EXAMPLE = "allocmoe compare reference --budgets 75%,50%,25% -o compare.json"


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
    from allocmoe.artifacts import Sensitivity, TokenRule
    from allocmoe.cli.tables import quality_markdown, quality_table
    from allocmoe.codec import check_writable, write_text
    from allocmoe.models import inspect_model
    from allocmoe.planning.compare import compare
    from allocmoe.planning.methods import METHODS, NEEDS_SENSITIVITY, Planner
    from allocmoe.profiling.profile import existing_profile, grid, make_context, profile
    from allocmoe.solver import parse_budget
    from allocmoe.text import check_disjoint

    methods = args.methods or list(METHODS)
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        raise AllocMoEError(f"unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    output = Path(args.output)
    if output.suffix == ".md":
        raise AllocMoEError("the result is JSON, the table beside it is .md: name the output .json")
    check_writable(output)
    kept = output.with_name(f"{output.stem}-sensitivity.json")
    args.interrupted_hint = lambda: common.resume_hint(f"{kept}.partial", [kept])
    sensitivity = Sensitivity.load(args.sensitivity) if args.sensitivity else None
    info = common.load_skeleton(args).info
    for budget in args.budgets:
        parse_budget(budget, info.k_orig)
    text, eval_text = common.load_text_pair(args, common.load_tokenizer(args))
    check_disjoint(text, eval_text)
    profiled = None if sensitivity is None else sensitivity.text
    if profiled is not None and profiled.sha256 == eval_text.info.sha256:
        raise AllocMoEError(
            f"{args.sensitivity} was measured on {eval_text.info.source}, the very text to "
            "measure on: give another --eval-text"
        )
    model = common.load_model(args)
    info = inspect_model(model).info
    progress = common.make_progress()
    if sensitivity is None and NEEDS_SENSITIVITY & set(methods):
        sensitivity = existing_profile(
            kept,
            info,
            text,
            context=make_context("paper", info.k_orig, None, TokenRule()),
            token=TokenRule(),
            ks=grid(None, info.k_orig, TokenRule()),
            dtype=str(model.dtype),
            batch_size=args.batch_size,
        )
        if sensitivity is not None:
            progress.note(f"{kept} fits and is used again")
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
    common.console.print(f"saved in {output} and {output.with_suffix('.md')}", soft_wrap=True)
    if args.json:
        common.print_json(result.to_json())
