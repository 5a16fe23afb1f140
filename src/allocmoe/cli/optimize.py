"""allocmoe optimize: all of it, down to the plan that measures best."""

from __future__ import annotations

import argparse
from pathlib import Path

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

NAME = "optimize"
HELP = "profile, solve, measure the candidate plans on other text and keep the best"
EXAMPLE = "allocmoe optimize reference --budget 50% -o half"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument(
        "--budget", required=True, help="in total (78), as a share (50%%) or a mean (3.5/layer)"
    )
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="where all goes")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted profile")
    parser.add_argument(
        "--contexts",
        type=common.word_list,
        default=["paper", "single", "around"],
        help="profiles to try (default paper,single,around)",
    )
    parser.add_argument(
        "--no-token-rule", action="store_true", help="layer budgets only, without Alloc-T"
    )
    parser.add_argument(
        "--grid", type=common.number_list, metavar="K,K,...", help="profile these k only"
    )
    parser.add_argument(
        "--offload", action="store_true", help="keep the waiting hidden states in host memory"
    )
    common.add_rule_arguments(parser)
    common.add_text_arguments(parser)
    common.add_eval_text_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from allocmoe.cli.tables import plan_table, quality_table
    from allocmoe.codec import check_writable
    from allocmoe.planning.optimize import CONTEXTS, optimize
    from allocmoe.solver import parse_budget

    unknown = sorted(set(args.contexts) - set(CONTEXTS))
    if unknown:
        raise AllocMoEError(f"unknown context {unknown[0]!r}; known: {', '.join(CONTEXTS)}")
    directory = Path(args.output)
    check_writable(directory / "plan.json")
    args.interrupted_hint = lambda: common.resume_hint(
        next(directory.glob("*.partial"), directory / "none"), directory.glob("sensitivity-*.json")
    )
    parse_budget(args.budget, common.load_skeleton(args).info.k_orig)
    text, eval_text = common.load_text_pair(args, common.load_tokenizer(args))
    model = common.load_model(args)
    result = optimize(
        model,
        args.budget,
        text,
        eval_text,
        args.output,
        contexts=args.contexts,
        scope=None if args.no_token_rule else args.scope or "batch",
        k_base=1 if args.k_base is None else args.k_base,
        ks=args.grid,
        batch_size=args.batch_size,
        offload=args.offload,
        resume=args.resume,
        progress=common.make_progress(),
    )
    common.console.print(plan_table(result.plan))
    common.console.print(quality_table(result.evaluation, best=result.name))
    common.console.print(
        f"{result.name} measures best and is in {args.output}/plan.json; "
        f"the table is in {args.output}/candidates.json",
        soft_wrap=True,
    )
    if args.json:
        common.print_json(
            {
                "best": result.name,
                "plan": result.plan.to_json(),
                "evaluation": result.evaluation.to_json(),
            }
        )
