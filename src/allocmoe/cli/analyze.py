"""allocmoe analyze: what a plan does to the routing."""

from __future__ import annotations

import argparse
from pathlib import Path

from allocmoe.cli import common

NAME = "analyze"
HELP = "analyse a plan: expert load before and after, kept experts against entropy, sweeps"
EXAMPLE = "allocmoe analyze reference --plan plan.json -o analysis.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--plan", metavar="FILE", required=True, help="the plan")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the analysis")
    parser.add_argument(
        "--sweep-k-base", action="store_true", help="measure the plan at every k_base too"
    )
    parser.add_argument(
        "--sweep-texts",
        type=common.word_list,
        metavar="TEXT,...",
        help="profile on each of these texts too, at the plan's budget, and measure the plans",
    )
    common.add_text_arguments(parser, default="builtin:heldout", sequences=16)


def run(args: argparse.Namespace) -> None:
    from allocmoe.artifacts import Plan
    from allocmoe.cli.tables import analysis_table, sweep_tables
    from allocmoe.codec import check_writable
    from allocmoe.evaluation.analysis import analyze
    from allocmoe.models import inspect_model
    from allocmoe.planning.sweeps import check_k_base_sweep, sweep_k_base, sweep_texts
    from allocmoe.text import check_disjoint

    check_writable(Path(args.output))
    plan = Plan.load(args.plan)
    if args.sweep_k_base:
        check_k_base_sweep(plan)
    plan.check_fits(common.load_skeleton(args).info)
    tokenizer = common.load_tokenizer(args)
    text = common.load_text(args, tokenizer)
    sources = {
        name: common.load_named_text(name, tokenizer, 2 * args.sequences, args.length)
        for name in args.sweep_texts or []
    }
    for source in sources.values():
        check_disjoint(source, text)
    model = common.load_model(args)
    common.note_other_weights({args.plan: plan}, inspect_model(model).info)
    progress = common.make_progress()
    options = {"batch_size": args.batch_size, "progress": progress}
    k_base_rows = sweep_k_base(model, plan, text, **options) if args.sweep_k_base else []
    text_rows = sweep_texts(model, plan.budget, sources, text, **options) if sources else []
    result = analyze(
        model,
        plan,
        text,
        name=Path(args.plan).stem,
        k_base_sweep=k_base_rows,
        text_sweep=text_rows,
        **options,
    )
    result.save(args.output)
    common.console.print(analysis_table(result))
    for table in sweep_tables(result):
        common.console.print(table)
    common.console.print(f"saved in {args.output}", soft_wrap=True)
    if args.json:
        common.print_json(result.to_json())
