"""Parses the command line, runs the verb, and turns errors into one clear line."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from allocmoe.artifacts import version_of
from allocmoe.cli import (
    analyze,
    bench,
    common,
    compare,
    demo,
    evaluate,
    experiment,
    generate,
    inspect,
    models,
    optimize,
    plan,
    profile,
    report,
    serve,
    tune,
)
from allocmoe.cli.common import FAILED
from allocmoe.errors import AllocMoEError

VERBS = (
    demo,
    profile,
    plan,
    evaluate,
    compare,
    optimize,
    analyze,
    bench,
    tune,
    report,
    experiment,
    generate,
    serve,
    inspect,
    models,
)


class _Parser(argparse.ArgumentParser):
    """Usage errors are errors like all others: one line."""

    def error(self, message: str) -> NoReturn:
        raise AllocMoEError(f"{message}; see `{self.prog} --help`")


def make_parser() -> argparse.ArgumentParser:
    # an example that is copied must stay on its line, so the formatter leaves line ends alone
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="allocmoe",
        description="Runs fewer experts where it hurts least: a Mixture-of-Experts model and an\n"
        "activation budget in, a measured plan out.",
        epilog="example: allocmoe models",
        formatter_class=layout,
    )
    version = f"allocmoe {version_of('allocmoe')}"
    parser.add_argument("--version", action="version", version=version)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in VERBS:
        verb = verbs.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=f"example: {module.EXAMPLE}",
            formatter_class=layout,
        )
        if module is not serve:  # which becomes vLLM's server
            verb.add_argument(
                "--json", action="store_true", help="print one JSON document on stdout"
            )
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    words = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in words
    # piped into `head`, stop quietly
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    common.stop_at_once()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args = None
    try:
        args = make_parser().parse_args(words)
        args.command = shlex.join(["allocmoe", *words])
        common.check_launch(args.verb)
        args.run(args)
    except AllocMoEError as error:
        _fail(str(error), as_json)
    except KeyboardInterrupt:
        hint = getattr(args, "interrupted_hint", None)
        _fail(f"interrupted; {hint() if hint else 'nothing was changed'}", as_json)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _fail(
            "out of memory: try a smaller --batch-size or --task-batch-size, or shorter sequences",
            as_json,
        )
    sys.exit(0)


def _fail(message: str, as_json: bool) -> NoReturn:
    # of several ranks, one tells
    if os.environ.get("RANK", "0") == "0":
        if as_json:
            print(json.dumps({"error": message}))
        print(f"allocmoe: error: {message}", file=sys.stderr)
    sys.exit(FAILED)
