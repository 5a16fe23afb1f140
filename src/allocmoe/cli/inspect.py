"""allocmoe inspect: what is in a file, a folder or a hub id."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from allocmoe.cli import common

NAME = "inspect"
HELP = "show a plan, a sensitivity, a result or the MoE layers of a model"
EXAMPLE = "allocmoe inspect plan.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a JSON file, a model folder or a hub id")
    parser.add_argument("--revision", help="of the hub id: a branch, tag or commit")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )


def run(args: argparse.Namespace) -> None:
    if Path(args.target).is_file() or args.target.endswith(".json"):
        document = _artifact(args.target)
    else:
        document = _model(args)
    if args.json:
        common.print_json(document)


def _artifact(path: str) -> dict[str, Any]:
    from allocmoe.artifacts import (
        Analysis,
        Benchmark,
        Evaluation,
        Plan,
        Sensitivity,
        TaskEvaluation,
        load_artifact,
    )
    from allocmoe.cli.tables import (
        analysis_table,
        benchmark_tables,
        plan_table,
        quality_table,
        sensitivity_table,
        sweep_tables,
        task_table,
    )

    artifact = load_artifact(path)
    if isinstance(artifact, Plan):
        common.console.print(plan_table(artifact))
    elif isinstance(artifact, Sensitivity):
        common.console.print(sensitivity_table(artifact))
    elif isinstance(artifact, Evaluation):
        common.console.print(quality_table(artifact))
    elif isinstance(artifact, TaskEvaluation):
        common.console.print(task_table(artifact))
    elif isinstance(artifact, Analysis):
        for table in (analysis_table(artifact), *sweep_tables(artifact)):
            common.console.print(table)
    elif isinstance(artifact, Benchmark):
        common.console.print(*benchmark_tables(artifact), sep="\n")
    model, text = artifact.model, artifact.text
    facts = [f"model {model.id} ({model.family}), weights {model.fingerprint or 'not read'}"]
    if text is not None:
        facts.append(f"text {text.source}, {text.num_sequences} x {text.sequence_length} tokens")
    facts.append(f"made {artifact.created}")
    common.console.print("\n".join(facts), style="dim", soft_wrap=True)
    versions = ", ".join(f"{name} {version}" for name, version in artifact.versions.items())
    common.console.print(versions, style="dim")
    return artifact.to_json()


def _model(args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from allocmoe.cli.tables import NumberTable

    args.model = args.target
    moe = common.load_skeleton(args)
    info, family = moe.info, moe.family
    table = NumberTable(
        title=f"{info.id}: {info.family}, {len(info.k_orig)} MoE layers of "
        f"{len(moe.decoder_layers)}",
        caption=f"budgets from {len(info.k_orig)} to {sum(info.k_orig)} activations a token; "
        f"scores by {family.score}, renormalised: {family.renormalise}; "
        + ("tested family" if family.tested else "expected to work, no test of its own"),
    )
    for name in ("MoE layer", "experts", "k_orig"):
        table.add_column(name, justify="right")
    table.add_column("module", overflow="fold")
    for layer in moe.layers:
        table.add_row(str(layer.index), str(layer.num_experts), str(layer.k_orig), layer.name)
    common.console.print(table)
    return {"model": asdict(info), "num_decoder_layers": len(moe.decoder_layers)}
