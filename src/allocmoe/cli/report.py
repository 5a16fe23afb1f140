"""allocmoe report: the artefacts of a folder as one page."""

from __future__ import annotations

import argparse

from allocmoe.cli import common

NAME = "report"
HELP = "make one HTML page with plots from all artefacts in a folder"
EXAMPLE = "allocmoe report results -o report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="holds plans, sensitivities, results; plots go to DIR/plots",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="default DIR/report.html")


def run(args: argparse.Namespace) -> None:
    from allocmoe.report import write_report

    written = write_report(args.directory, args.output, progress=common.make_progress())
    common.console.print(
        f"{len(written.artifacts)} artefacts, {len(written.plots) // 2} plots: saved in "
        f"{written.page}",
        soft_wrap=True,
    )
    if args.json:
        common.print_json(
            {
                "report": str(written.page),
                "plots": [str(path) for path in written.plots],
                "artifacts": list(written.artifacts),
            }
        )
