"""Parses the command line, runs the verb, and turns errors into one clear line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from allocmoe.cli import (
    compare,
    evaluate,
    generate,
    inspect,
    models,
    optimize,
    plan,
    profile,
)
from allocmoe.errors import AllocMoEError

VERBS = (profile, plan, evaluate, compare, generate, optimize, inspect, models)

# bad input and an interrupted run alike: nothing is lost, and the line says how to go on
FAILED = 2


def make_parser() -> argparse.ArgumentParser:
    from importlib.metadata import version

    parser = argparse.ArgumentParser(
        prog="allocmoe",
        description="Runs fewer experts where it hurts least: a Mixture-of-Experts model and an "
        "activation budget in, a measured plan out.",
        epilog="example: allocmoe models",
    )
    parser.add_argument("--version", action="version", version=f"allocmoe {version('allocmoe')}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in VERBS:
        verb = verbs.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=f"example: {module.EXAMPLE}",
        )
        verb.add_argument("--json", action="store_true", help="print one JSON document on stdout")
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    # piped into `head`, stop quietly
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _interrupt)
    args = make_parser().parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        args.run(args)
    except AllocMoEError as error:
        _fail(str(error), args.json)
    except KeyboardInterrupt:
        hint = getattr(args, "interrupted_hint", "nothing was changed")
        _fail(f"interrupted; {hint}", args.json)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _fail("out of memory: try a smaller --batch-size or --length", args.json)
    sys.exit(0)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: str, as_json: bool) -> NoReturn:
    if as_json:
        print(json.dumps({"error": message}))
    print(f"allocmoe: error: {message}", file=sys.stderr)
    sys.exit(FAILED)
