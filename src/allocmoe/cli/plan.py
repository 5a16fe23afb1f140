"""allocmoe plan: split a budget."""

from __future__ import annotations

import argparse
from pathlib import Path

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

NAME = "plan"
HELP = "split an activation budget over the layers and tokens of a model"
EXAMPLE = "allocmoe plan --method uniform --budget 50% --model reference -o plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method",
        required=True,
        metavar="METHOD",
        help="alloc-moe, alloc-l, alloc-t, uniform, ascending, descending, lexi, naee or "
        "dynamic-moe",
    )
    parser.add_argument(
        "--budget", required=True, help="in total (78), as a share (50%%) or a mean (3.5/layer)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the plan")
    parser.add_argument(
        "--sensitivity", metavar="FILE", help="from `allocmoe profile`, for alloc-l and alloc-moe"
    )
    parser.add_argument(
        "--normalisation",
        choices=("log", "relative", "raw"),
        default="log",
        help="what a row of the sensitivity costs (default log)",
    )
    parser.add_argument(
        "--lexi-search",
        choices=("exact", "evolve"),
        default="exact",
        help="LExI's optimum, or its own evolutionary search (default exact)",
    )
    common.add_rule_arguments(parser)
    parser.add_argument(
        "--renormalise-over",
        type=int,
        metavar="K2",
        help="in models that renormalise: divide by the mass of the first K2 experts instead of "
        "the kept ones",
    )
    common.add_model_arguments(parser, positional=False)
    common.add_text_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from allocmoe.artifacts import Sensitivity
    from allocmoe.cli.tables import plan_table
    from allocmoe.codec import check_writable
    from allocmoe.models import inspect_model
    from allocmoe.planning.methods import (
        METHODS,
        NEEDS_SENSITIVITY,
        NEEDS_TEXT,
        NEEDS_WEIGHTS,
        Planner,
    )
    from allocmoe.runtime.control import check_renormalises
    from allocmoe.solver import parse_budget

    if args.method not in METHODS:
        raise AllocMoEError(f"unknown method {args.method!r}; known: {', '.join(METHODS)}")
    check_writable(Path(args.output))
    sensitivity = Sensitivity.load(args.sensitivity) if args.sensitivity else None
    threshold = args.scope == "threshold" and args.method in ("alloc-t", "alloc-moe")
    weights = args.method in NEEDS_WEIGHTS or threshold
    if args.method in NEEDS_SENSITIVITY and sensitivity is None:
        raise AllocMoEError(
            f"the method {args.method} needs a --sensitivity: make one with `allocmoe profile`"
        )
    if args.model is None and (weights or sensitivity is None):
        what = "the scope threshold" if threshold else f"the method {args.method}"
        raise AllocMoEError(f"{what} needs --model" + ("" if weights else " or a --sensitivity"))
    model = text = None
    if args.model is not None:
        skeleton = common.load_skeleton(args)
        info = skeleton.info
        parse_budget(args.budget, info.k_orig)
        if args.renormalise_over is not None:
            check_renormalises(skeleton.layers[0], skeleton.family)
        if args.method in NEEDS_TEXT or threshold:
            text = common.load_text(args, common.load_tokenizer(args))
        if weights:
            model = common.load_model(args)
            info = inspect_model(model).info
    else:
        assert sensitivity is not None
        info = sensitivity.model
    plan = Planner(
        info,
        model=model,
        text=text,
        sensitivity=sensitivity,
        scope=args.scope,
        k_base=args.k_base,
        renormalise_over=args.renormalise_over,
        normalisation=args.normalisation,
        lexi_search=args.lexi_search,
        batch_size=args.batch_size,
        progress=common.make_progress(),
    ).plan(args.method, args.budget)
    plan.save(args.output)
    common.console.print(plan_table(plan))
    common.console.print(f"saved in {args.output}", soft_wrap=True)
    if args.json:
        common.print_json(plan.to_json())
