"""allocmoe models: which families are supported."""

from __future__ import annotations

import argparse

from rich.table import Table

from allocmoe.cli import common

NAME = "models"
HELP = "list the supported model families, and the refused ones with the reason"
EXAMPLE = "allocmoe models --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> None:
    from allocmoe.models.families import FAMILIES, REFUSED

    tested = sorted(name for name, family in FAMILIES.items() if family.tested)
    expected = sorted(set(FAMILIES) - set(tested))
    table = Table(show_header=False)
    table.add_row(f"tested ({len(tested)})", ", ".join(tested))
    table.add_row(f"expected ({len(expected)})", ", ".join(expected))
    common.console.print(table)
    refused = Table(title="refused")
    refused.add_column("family")
    refused.add_column("because")
    for name, reason in REFUSED.items():
        refused.add_row(name, reason)
    common.console.print(refused)
    if args.json:
        common.print_json({"tested": tested, "expected": expected, "refused": REFUSED})
