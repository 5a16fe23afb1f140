"""allocmoe serve: a model under a plan in vLLM's server."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from importlib.metadata import entry_points
from typing import Any

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

NAME = "serve"
HELP = "serve a model under a plan with vLLM"
EXAMPLE = "allocmoe serve MODEL --plan plan.json --port 8000 --max-model-len 4096"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a hub id, a folder, or reference")
    parser.add_argument("--plan", metavar="FILE", help="what to serve")
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="vLLM's own options, see `vllm serve --help`",
    )


def run(args: argparse.Namespace) -> None:
    from allocmoe.artifacts import Plan
    from allocmoe.models import inspect_model, load

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--plan", default=args.plan)
    own.add_argument("--additional-config", default="{}")
    own.add_argument("--trust-remote-code", action="store_true")
    own.add_argument("--revision")
    own.add_argument("--worker-extension-cls")
    known, rest = own.parse_known_args([_dashed(word) for word in args.options])
    if known.worker_extension_cls:
        raise AllocMoEError("leave out --worker-extension-cls: serve has its own, to show the plan")
    if any(word.startswith("--additional-config.") for word in rest):
        raise AllocMoEError("give --additional-config as one JSON object, not in parts")
    if known.plan is None:
        raise AllocMoEError("give a --plan")
    if importlib.util.find_spec("vllm") is None:
        raise AllocMoEError("serving needs vLLM 0.26 or newer: pip install vllm")
    plan = Plan.load(known.plan)
    skeleton = load.load_skeleton(
        args.model, revision=known.revision, trust_remote_code=known.trust_remote_code
    )
    plan.check_fits(inspect_model(skeleton).info)
    if plan.token.scope == "batch":
        common.console.print(
            "note: in the batch scope an answer depends on what else is in the batch, and the "
            "prefix cache keeps it so; a plan with --scope threshold does not, and "
            "--no-enable-prefix-caching keeps the cache clean",
            style="yellow",
        )
    if known.revision:
        rest += ["--revision", known.revision]
    if known.trust_remote_code:
        rest.append("--trust-remote-code")
    command = serve_command(load.place(args.model), plan.to_json(), known.additional_config, rest)
    os.environ["VLLM_PLUGINS"] = _plugins()
    sys.stderr.flush()
    os.execv(sys.executable, command)


def _dashed(word: str) -> str:
    """An option as vLLM reads it, which takes underscores for dashes."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def serve_command(model: str, plan: dict[str, Any], config: str, options: list[str]) -> list[str]:
    """`vllm serve` with the plan inline, where workers on other machines find it."""
    from allocmoe.runtime.vllm.served import KEY
    from allocmoe.runtime.vllm.worker import EXTENSION

    try:
        merged = {**json.loads(config), KEY: {"plan": plan}}
    except (TypeError, ValueError) as error:
        raise AllocMoEError(f"--additional-config is no JSON object: {error}") from error
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        model,
        "--additional-config",
        json.dumps(merged),
        "--worker-extension-cls",
        EXTENSION,
        *options,
    ]


def _plugins() -> str:
    """vLLM loads our endpoint only if it is named, and then only what is named: so name all."""
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None:
        return ",".join(dict.fromkeys([*filter(None, named.split(",")), "allocmoe"]))
    groups = ("general", "platform", "io_processor", "stat_logger")
    found = [
        point.name for group in groups for point in entry_points(group=f"vllm.{group}_plugins")
    ]
    # what vLLM itself loads only if a user names it: downloads, and endpoints of others
    closed = {"lora_hf_hub_resolver"}
    closed |= {point.name for point in entry_points(group="vllm.endpoint_plugins")}
    found = [name for name in found if name not in closed]
    return ",".join(dict.fromkeys([*found, "allocmoe"]))
