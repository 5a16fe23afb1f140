"""allocmoe profile: measure how sensitive each layer is."""

from __future__ import annotations

import argparse
from typing import Any

from allocmoe.cli import common

NAME = "profile"
HELP = "measure how sensitive each MoE layer is to its number of activations"
EXAMPLE = "allocmoe profile reference -o sensitivity.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    common.add_text_arguments(parser)
    common.add_engine_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the sensitivity")
    parser.add_argument("--resume", action="store_true", help="go on with the rows in FILE.partial")
    group = parser.add_argument_group("what to measure")
    group.add_argument(
        "--context",
        choices=("paper", "single", "around"),
        default="paper",
        help="the other layers meanwhile: before full and after at 1 (paper), all full (single), "
        "or all at a uniform budget (around)",
    )
    group.add_argument("--budget", help="for the context around: 78, 50%% or 3.5/layer")
    group.add_argument(
        "--token-rule",
        choices=("none", "batch", "sequence"),
        default="none",
        help="Alloc-T in this scope is on while measuring (default none)",
    )
    group.add_argument("--k-base", type=int, default=1, help="of Alloc-T (default 1)")
    group.add_argument(
        "--grid",
        type=common.number_list,
        metavar="K,K,...",
        help="measure these k only; halves and the like with a token rule",
    )
    group.add_argument(
        "--offload", action="store_true", help="keep the waiting hidden states in host memory"
    )


def run(args: argparse.Namespace) -> None:
    from allocmoe.artifacts import TokenRule
    from allocmoe.cli.tables import sensitivity_table
    from allocmoe.profiling.profile import better_cut, check_settings, profile
    from allocmoe.profiling.ranks import torchrun_ranks
    from allocmoe.progress import Progress

    args.interrupted_hint = lambda: common.resume_hint(f"{args.output}.partial")
    with torchrun_ranks() as ranks:
        chief = ranks.rank == 0
        k_orig = common.load_skeleton(args).k_orig
        common.engine_options(args)
        rule = args.token_rule
        token = TokenRule() if rule == "none" else TokenRule("alloc-t", rule, args.k_base)
        check_settings(
            k_orig,
            args.context,
            args.budget,
            token,
            args.grid,
            args.batch_size,
            args.output,
            args.resume,
        )
        text = common.load_text(args, common.load_tokenizer(args))
        model: Any
        if args.engine == "vllm":
            model = common.load_engine(args, text.ids.shape[1])
        else:
            model = common.load_model(args)
        result = profile(
            model,
            text,
            context=args.context,
            budget=args.budget,
            token=token,
            ks=args.grid,
            batch_size=args.batch_size,
            offload=args.offload,
            save_to=args.output,
            resume=args.resume,
            progress=common.make_progress() if chief else Progress(),
        )
    if not chief:
        return
    common.console.print(sensitivity_table(result))
    if falls := better_cut(result):
        named = ", ".join(f"{layer} ({fall:+.1%})" for layer, fall in falls.items())
        common.console.print(
            f"note: fewer experts lower the perplexity of this text in MoE layers {named}: it may "
            "be foreign to the model, and a plan from it bad for other text. Calibrate on text "
            "like what you serve, or let `allocmoe optimize` measure",
            style="yellow",
        )
    common.console.print(f"saved in {args.output}", soft_wrap=True)
    if args.json:
        common.print_json(result.to_json())
