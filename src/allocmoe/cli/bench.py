"""allocmoe bench: how much time a plan saves."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

if TYPE_CHECKING:
    from torch import nn

    from allocmoe.artifacts import Plan, Sensitivity
    from allocmoe.models import MoEModel

NAME = "bench"
HELP = "time prefill and decode of plans against the unmodified model"
EXAMPLE = (
    "allocmoe bench reference --batch-size 2 --prompt 8 --decode 4 --warmups 1 --runs 2 -o b.json"
)

METHODS = ("uniform", "alloc-t")
BUDGETS = ("50%",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser, required=False)
    common.add_shape_argument(parser)
    parser.add_argument("--layers", type=int, metavar="N", help="only the first N of the shape's")
    parser.add_argument("-o", "--output", metavar="FILE", help="the result as JSON")
    _add_plan_arguments(parser)
    _add_protocol_arguments(parser)
    group = parser.add_argument_group("how it runs")
    group.add_argument(
        "--no-stock",
        action="store_true",
        help="leave out the row of the unmodified model as transformers runs it",
    )
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the decode step (default: on a GPU)",
    )
    group.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        help="replay the steps as CUDA graphs (default: on a GPU)",
    )


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plans (default: uniform and alloc-t at 50%)")
    group.add_argument(
        "--plan", action="append", metavar="FILE", help="a plan; give the option again for more"
    )
    group.add_argument(
        "--methods", type=common.word_list, metavar="NAME,...", help="default uniform,alloc-t"
    )
    group.add_argument("--budgets", type=common.word_list, help="for the methods (default 50%%)")
    group.add_argument(
        "--sensitivity", metavar="FILE", help="from `allocmoe profile`, for alloc-l and alloc-moe"
    )
    common.add_rule_arguments(parser)


def _add_protocol_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("protocol")
    group.add_argument("--batch-size", type=int, default=8, help="sequences (default 8)")
    group.add_argument(
        "--prompt",
        type=common.count_list,
        default=[32],
        metavar="N,...",
        help="tokens of a prompt; the decode follows the first length (default 32)",
    )
    group.add_argument("--decode", type=int, default=128, help="tokens decoded (default 128)")
    group.add_argument("--warmups", type=int, default=5, help="untimed runs before (default 5)")
    group.add_argument("--runs", type=int, default=10, help="timed runs (default 10)")
    group.add_argument(
        "--seed", type=common.seed, default=0, help="of the tokens and random weights"
    )


def run(args: argparse.Namespace) -> None:
    from allocmoe.artifacts import Plan, Protocol, Sensitivity
    from allocmoe.bench.benchmark import benchmark
    from allocmoe.cli.tables import benchmark_tables
    from allocmoe.codec import check_writable
    from allocmoe.models import inspect_model

    common.check_model_or_shape(args)
    if args.layers is not None and args.shape is None:
        raise AllocMoEError("--layers goes with a --shape")
    protocol = Protocol(
        args.batch_size, tuple(args.prompt), args.decode, args.warmups, args.runs, args.seed
    )
    if args.output:
        check_writable(Path(args.output))
    files = common.plan_names(args.plan or [])
    plans = {name: Plan.load(file) for name, file in files.items()}
    sensitivity = Sensitivity.load(args.sensitivity) if args.sensitivity else None
    skeleton = common.load_skeleton(args)
    for plan in plans.values():
        plan.check_fits(skeleton.info)
    _check_methods(args, skeleton, sensitivity)
    model = _load(args)
    for name, plan in _make_plans(args, model, sensitivity).items():
        if name in plans:
            raise AllocMoEError(f"a plan file and a method have the same name {name}")
        plans[name] = plan
    common.note_other_weights(plans, inspect_model(model).info)
    result = benchmark(
        model,
        plans,
        protocol=protocol,
        experts=args.experts,
        stock=not args.no_stock,
        compiled=args.compile,
        graphs=args.graphs,
        random_weights=args.shape is not None,
        command=args.command,
        progress=common.make_progress(),
    )
    common.console.print(*benchmark_tables(result), sep="\n")
    if args.output:
        result.save(args.output)
        common.console.print(f"saved in {args.output}", soft_wrap=True)
    if args.json:
        common.print_json(result.to_json())


def _methods(args: argparse.Namespace) -> list[str]:
    """Those asked for; the default ones where nothing at all is said, or budgets alone."""
    if args.methods is None and args.plan and args.budgets is None:
        return []
    return args.methods or list(METHODS)


def _check_methods(
    args: argparse.Namespace, skeleton: MoEModel, sensitivity: Sensitivity | None
) -> None:
    """Before gigabytes of weights are read."""
    from allocmoe.planning.methods import METHODS, NEEDS_SENSITIVITY
    from allocmoe.solver import parse_budget

    for method in _methods(args):
        if method not in METHODS:
            raise AllocMoEError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
        if method in NEEDS_SENSITIVITY and sensitivity is None:
            raise AllocMoEError(f"the method {method} needs a --sensitivity")
    for budget in args.budgets or BUDGETS:
        parse_budget(budget, skeleton.info.k_orig)


def _load(args: argparse.Namespace) -> nn.Module:
    from allocmoe.models.shapes import build_shape

    if args.shape is None:
        return common.load_model(args, kernel=False)
    return build_shape(
        args.shape, layers=args.layers, dtype=args.dtype, device=args.device, seed=args.seed
    )


def _make_plans(
    args: argparse.Namespace, model: nn.Module, sensitivity: Sensitivity | None
) -> dict[str, Plan]:
    """A plan of every method at every budget; thresholds are calibrated on random tokens."""
    import torch

    from allocmoe.models import inspect_model
    from allocmoe.planning.methods import Planner
    from allocmoe.text import text_from_ids

    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(vocabulary, (16, 128), generator=generator)
    planner = Planner(
        inspect_model(model).info,
        model=model,
        text=text_from_ids(tokens, "random tokens"),
        sensitivity=sensitivity,
        scope=args.scope,
        k_base=args.k_base,
        progress=common.make_progress(),
    )
    plans = [
        planner.plan(method, budget)  # type: ignore[arg-type]
        for budget in args.budgets or BUDGETS
        for method in _methods(args)
    ]
    return {f"{plan.method}@{plan.budget}": plan for plan in plans}
