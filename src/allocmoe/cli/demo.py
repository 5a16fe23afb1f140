"""allocmoe demo: all of it on the model that comes with the package."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from allocmoe.cli import common

NAME = "demo"
HELP = "profile the bundled model, compare all methods, analyse the best plan, write the report"
EXAMPLE = "allocmoe demo -o demo"

BUDGETS = ("75%", "50%", "25%")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", metavar="DIR", default="demo", help="where all goes (default demo)"
    )


def run(args: argparse.Namespace) -> None:
    from allocmoe.cli.tables import quality_markdown, quality_table
    from allocmoe.codec import check_writable, write_text
    from allocmoe.evaluation.analysis import analyze
    from allocmoe.models import inspect_model
    from allocmoe.models.load import REFERENCE
    from allocmoe.planning.compare import compare
    from allocmoe.planning.methods import Planner
    from allocmoe.planning.sweeps import sweep_k_base
    from allocmoe.profiling.profile import profile
    from allocmoe.report import write_report

    began = time.monotonic()
    directory = Path(args.output)
    check_writable(directory / "report.html")
    args.interrupted_hint = lambda: f"run it again, what is finished in {directory} is used"
    for name, value in vars(_defaults()).items():
        setattr(args, name, value)
    args.model = REFERENCE
    common.load_skeleton(args)
    text, eval_text = common.load_text_pair(args, common.load_tokenizer(args))
    model = common.load_model(args)
    progress = common.make_progress()

    progress.note("1/4 how sensitive is each layer?")
    sensitivity = profile(
        model, text, save_to=directory / "sensitivity.json", resume=True, progress=progress
    )
    progress.note("2/4 every method at 75 %, 50 % and 25 % of the activations")
    planner = Planner(
        inspect_model(model).info,
        model=model,
        text=text,
        sensitivity=sensitivity,
        progress=progress,
    )
    result, plans = compare(model, planner, eval_text, BUDGETS, progress=progress)
    result.save(directory / "compare.json")
    write_text(directory / "compare.md", quality_markdown(result))
    for name, plan in plans.items():
        plan.save(directory / "plans" / f"{name}.json")
    progress.note("3/4 what does the plan at 50 % do to the routing?")
    name = f"alloc-moe@{sum(sensitivity.model.k_orig) // 2}"
    sweep = sweep_k_base(model, plans[name], eval_text, progress=progress)
    analysis = analyze(
        model, plans[name], eval_text, name=name, k_base_sweep=sweep, progress=progress
    )
    analysis.save(directory / "analysis.json")
    progress.note("4/4 the report")
    page = write_report(directory, progress=progress).page
    common.console.print(quality_table(result))
    seconds = time.monotonic() - began
    common.console.print(f"done in {seconds:.0f} s; open {page} in a browser", soft_wrap=True)
    if args.json:
        common.print_json({"report": str(page), "evaluation": result.to_json()})


def _defaults() -> argparse.Namespace:
    """What the other verbs would take if nothing were said."""
    parser = argparse.ArgumentParser()
    common.add_model_arguments(parser, positional=False)
    common.add_text_arguments(parser)
    common.add_eval_text_arguments(parser)
    return parser.parse_args([])
