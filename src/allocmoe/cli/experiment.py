"""allocmoe experiment: the paper's experiments, cell by cell."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from allocmoe.cli import common
from allocmoe.errors import AllocMoEError

if TYPE_CHECKING:
    from allocmoe.experiment.grid import Grid
    from allocmoe.experiment.results import Results
    from allocmoe.experiment.run import Agenda
    from allocmoe.experiment.settings import Settings
    from allocmoe.experiment.task_files import PreparedTasks
    from allocmoe.experiment.worker import Job

NAME = "experiment"
HELP = "run the paper's experiments: every method, budget and task, resumable, into tables"
EXAMPLE = "allocmoe experiment paper --model deepseek-v2-lite --quick"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="NAME", help="paper, small, or a .toml file")
    parser.add_argument(
        "--model", metavar="NAME", required=True, help="one of the experiment's models"
    )
    parser.add_argument(
        "--weights", metavar="MODEL", help="a folder or hub id instead of the experiment's own"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the whole form in minutes: the bundled model, a few made-up items of each task",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="where all goes (default NAME-MODEL[-quick])"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="the tasks' published files, instead of the hub"
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="NAME=SOURCE",
        help="a file or another source for one of the experiment's texts; give it again for more",
    )
    parser.add_argument(
        "--kinds",
        type=common.word_list,
        metavar="KIND,...",
        help="only cells of these kinds, and the profiles and plans that they need",
    )
    parser.add_argument("--status", action="store_true", help="show what is done and left, and end")
    parser.add_argument(
        "--retry", action="store_true", help="try again what was left out as impossible"
    )
    group = parser.add_argument_group("several workers, through Ray")
    group.add_argument("--workers", type=common.positive, default=1, metavar="N", help="default 1")
    group.add_argument("--ray", metavar="ADDRESS", help="of a running cluster; auto finds it")
    group.add_argument(
        "--gpus-per-worker", type=float, metavar="X", help="default 1 if the cluster has any"
    )
    common.add_loading_arguments(parser)
    common.add_engine_arguments(parser)
    parser.add_argument(
        "--task-length",
        type=common.positive,
        default=4096,
        metavar="N",
        help="tokens of the longest input and answer, for the engine vllm (default 4096)",
    )


def run(args: argparse.Namespace) -> None:
    from allocmoe.cli.tables import plain_table
    from allocmoe.experiment.claims import make_claims
    from allocmoe.experiment.grid import KINDS, make_grid
    from allocmoe.experiment.results import Results
    from allocmoe.experiment.run import Agenda, run_grid
    from allocmoe.experiment.settings import load_settings
    from allocmoe.experiment.store import Store
    from allocmoe.experiment.write import write_results

    settings = load_settings(args.experiment)
    model = settings.model(args.model)
    if args.quick:
        settings = settings.quickened()
    for kind in args.kinds or ():
        if kind not in KINDS:
            raise AllocMoEError(f"--kinds: no kind {kind!r}; known: {', '.join(KINDS)}")
    folder = Path(args.output or _default_folder(args))
    job = _make_job(args, settings, model.id, folder)
    args.interrupted_hint = lambda: (
        f"finished cells are in {folder}, the same command goes on from there"
    )
    args.model = job.weights
    info = common.load_skeleton(args).info
    store = Store.open(folder, job, begin=not args.status)
    prepared = _prepare(settings, job.data)
    for line in [] if prepared is None else _task_notes(prepared):
        common.console.print(f"note: {line}", style="yellow")
    tasks = [task.task for task in settings.tasks.all()]
    if prepared is not None:
        tasks = [task for task in tasks if task in prepared.names]
    whole = make_grid(settings, model, info, tasks)
    if args.retry and not args.status:
        store.retry(whole.cells)
    grid = whole.only(args.kinds) if args.kinds else whole
    common.console.print(plain_table(*_status(grid, Agenda(grid, store))))
    if not args.status:
        run_grid(
            job,
            grid,
            store,
            workers=args.workers,
            address=args.ray,
            gpus_per_worker=args.gpus_per_worker,
            progress=common.make_progress(),
        )
    agenda = Agenda(grid, store)
    results = Results(
        settings,
        model,
        info,
        whole,
        Agenda(whole, store).results,
        missing={} if prepared is None else prepared.missing,
        notes=() if prepared is None else prepared.notes,
    )
    if not args.status:
        page = write_results(results, folder, args.command)
        _show_claims(results)
        if agenda.left_out:
            common.console.print(
                f"note: {len(agenda.left_out)} cells could not be had; --retry tries them again",
                style="yellow",
            )
        common.console.print(f"tables and figures are in {page}", soft_wrap=True)
    if args.json:
        common.print_json(
            {
                "folder": str(folder),
                "cells": len(grid.cells),
                "finished": len(agenda.results),
                "left_out": agenda.left_out,
                "claims": [vars(claim) for claim in make_claims(results)],
            }
        )


def _show_claims(results: Results) -> None:
    from allocmoe.cli.tables import plain_table
    from allocmoe.experiment.claims import make_claims

    rows = [(claim.name, claim.by, claim.here, claim.verdict) for claim in make_claims(results)]
    common.console.print(plain_table(("the paper's claim", "by", "here", "verdict"), rows))


def _make_job(args: argparse.Namespace, settings: Settings, model_id: str, folder: Path) -> Job:
    from allocmoe.experiment.settings import experiment_file
    from allocmoe.experiment.worker import Job

    data = args.data
    if data is None and args.quick:
        data = experiment_file("sample")
    elif data is not None and not Path(data).is_dir():
        raise AllocMoEError(f"{data}: no such folder of task files")
    return Job(
        settings=settings,
        model=args.model,
        weights=args.weights or (settings.quick.weights if args.quick else model_id),
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        dtype=args.dtype,
        device=args.device,
        experts=args.experts,
        engine=args.engine,
        engine_options=common.engine_options(args),
        max_length=args.task_length,
        data=None if data is None else str(data),
        texts=_texts(args.text, settings),
        scratch=str(folder / "scratch"),
        command=args.command,
    )


def _default_folder(args: argparse.Namespace) -> str:
    name = Path(args.experiment).stem
    return f"{name}-{args.model}{'-quick' if args.quick else ''}"


def _texts(words: list[str], settings: Settings) -> dict[str, str]:
    known = {t.name for t in (*settings.calibration.texts, *settings.measurement.texts)}
    found = {}
    for word in words:
        name, equals, source = word.partition("=")
        if not equals or name not in known:
            raise AllocMoEError(
                f"--text takes NAME=SOURCE with a NAME of {', '.join(sorted(known))}, not {word!r}"
            )
        found[name] = source
    return found


def _prepare(settings: Settings, data: str | None) -> PreparedTasks | None:
    from allocmoe.experiment.task_files import prepare_tasks

    if data is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        names = [task.task for task in settings.tasks.all()]
        return prepare_tasks(names, Path(data), Path(folder))


def _task_notes(prepared: PreparedTasks) -> list[str]:
    missing = [f"{name} is left out: {reason}" for name, reason in prepared.missing.items()]
    return [*missing, *prepared.notes]


def _status(grid: Grid, agenda: Agenda) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows: list[tuple[str, ...]] = [
        (
            kind,
            str(count),
            str(sum(cell.kind == kind and cell.id in agenda.results for cell in grid.cells)),
            str(sum(cell.kind == kind for cell in agenda.left)),
            str(sum(cell.kind == kind and cell.id in agenda.left_out for cell in grid.cells)),
        )
        for kind, count in grid.counts().items()
        if count
    ]
    return ("cells", "all", "done", "left", "left out"), rows
