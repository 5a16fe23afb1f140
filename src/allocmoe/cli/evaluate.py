"""allocmoe eval: what a plan costs in quality."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

NAME = "eval"
HELP = "measure plans: perplexity or scores on tasks, against the unmodified model; what really ran"
EXAMPLE = "allocmoe eval reference --plan plan.json"

TASK_BATCH_SIZE = 8


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
    common.add_engine_arguments(parser)
    _add_task_arguments(parser)


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tasks of lm-evaluation-harness, instead of a text")
    group.add_argument(
        "--tasks", type=common.word_list, metavar="NAME,...", help="such as arc_easy,hellaswag"
    )
    group.add_argument("--tasks-dir", metavar="DIR", help="YAML files of tasks of your own")
    group.add_argument(
        "--limit", type=common.positive, metavar="N", help="only the first N items of each task"
    )
    group.add_argument(
        "--shots", type=int, metavar="N", help="examples before each question (default: the task's)"
    )
    group.add_argument(
        "--task-batch-size",
        type=common.positive,
        metavar="N",
        help=f"inputs in a forward (default {TASK_BATCH_SIZE}; vllm makes its own batches)",
    )
    group.add_argument(
        "--task-length",
        type=common.positive,
        default=2048,
        metavar="N",
        help="tokens of the longest input, for the engine vllm (default 2048)",
    )


def run(args: argparse.Namespace) -> None:
    from allocmoe.artifacts import Evaluation, Plan, TaskEvaluation
    from allocmoe.cli.tables import quality_table, task_table
    from allocmoe.codec import check_writable
    from allocmoe.evaluation.quality import evaluate
    from allocmoe.evaluation.tasks import evaluate_tasks, load_tasks
    from allocmoe.models import inspect_model

    for option in ("tasks_dir", "limit", "shots", "task_batch_size"):
        if args.tasks is None and getattr(args, option) is not None:
            raise AllocMoEError(f"--{option.replace('_', '-')} goes with --tasks")
    if args.output:
        check_writable(Path(args.output))
    common.engine_options(args)
    plans = {name: Plan.load(file) for name, file in common.plan_names(args.plan).items()}
    skeleton = common.load_skeleton(args)
    for plan in plans.values():
        plan.check_fits(skeleton.info)
    tokenizer = common.load_tokenizer(args)
    if args.tasks is None:
        text = common.load_text(args, tokenizer)
    else:
        tasks = load_tasks(args.tasks, args.tasks_dir, shots=args.shots)
    model: Any
    if args.engine == "vllm":
        length = text.ids.shape[1] if args.tasks is None else args.task_length
        model = common.load_engine(args, length, tokenizes=args.tasks is not None)
        info = skeleton.info  # its weights are elsewhere
    else:
        model = common.load_model(args)
        info = inspect_model(model).info
    common.note_other_weights(plans, info)
    result: Evaluation | TaskEvaluation
    if args.tasks is None:
        result = evaluate(
            model,
            plans,
            text,
            batch_size=args.batch_size,
            progress=common.make_progress(),
        )
        common.console.print(quality_table(result))
    else:
        result = evaluate_tasks(
            model,
            tokenizer,
            plans,
            tasks,
            limit=args.limit,
            batch_size=args.task_batch_size or TASK_BATCH_SIZE,
            progress=common.make_progress(),
        )
        common.console.print(task_table(result))
    if args.output:
        result.save(args.output)
        common.console.print(f"saved in {args.output}", soft_wrap=True)
    if args.json:
        common.print_json(result.to_json())
