"""Runs what is left of a grid: in this process, or by several workers through Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from allocmoe.errors import AllocMoEError
from allocmoe.experiment.grid import Cell, Grid
from allocmoe.experiment.store import Store
from allocmoe.experiment.worker import Input, Job, Result, Worker, input_of
from allocmoe.progress import Bar, Progress


@dataclass
class Agenda:
    """What can be run now, what waits for it, and what is left out."""

    grid: Grid
    store: Store
    # cells that cannot be had, with the reason
    left_out: dict[str, str] = field(default_factory=dict)
    # cells whose worker died once
    died: set[str] = field(default_factory=set)
    left: list[Cell] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    # what finished cells read: the first cell that did, and the sha256
    inputs: dict[Input, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = list(self.grid.cells)
        for cell in self.grid.cells:
            reason = self.store.left_out(cell)
            if reason is not None and cell in self.left:
                self._leave_out(cell, reason)
        for cell in list(self.left):
            found = self.store.load(cell)
            if found is not None:
                self._keep(cell, found["result"])
                self.left.remove(cell)

    @property
    def fingerprint(self) -> str | None:
        """Of the weights that were measured, if any result tells."""
        known = (found.get("model", {}).get("fingerprint") for found in self.results.values())
        return next((name for name in known if name is not None), None)

    def next(self) -> tuple[Cell, dict[str, Result]] | None:
        """A cell that has all it needs, with that; it is no longer left."""
        for cell in self.left:
            if all(need in self.results for need in cell.needs):
                self.left.remove(cell)
                return cell, {need: self.results[need] for need in cell.needs}
        return None

    def finish(self, cell: Cell, found: Result) -> None:
        self._keep(cell, found["result"])
        self.store.save(cell, found)

    def _keep(self, cell: Cell, result: Result) -> None:
        """Refuses a result on other content than that of an earlier one."""
        read = input_of(cell, result)
        if read is not None:
            what, sha256 = read
            first, known = self.inputs.setdefault(what, (cell.id, sha256))
            if sha256 != known:
                raise AllocMoEError(
                    f"{cell.id} and {first} were not measured on the same content: give the same "
                    "text and data as before, or choose another folder"
                )
        self.results[cell.id] = result

    def fail(self, cell: Cell, reason: str) -> None:
        self.store.leave_out(cell, reason)
        self._leave_out(cell, reason)

    def _leave_out(self, cell: Cell, reason: str) -> None:
        """The cells that needed this one are left out too; those that compare go on without it."""
        gone = [(cell.id, reason)]
        while gone:
            name, why = gone.pop()
            self.left_out[name] = why
            kept = []
            for other in self.left:
                rest = tuple(need for need in other.needs if need != name)
                if other.id == name:
                    continue
                if rest == other.needs:
                    kept.append(other)
                elif rest and other.kind in ("text", "speed"):
                    kept.append(replace(other, needs=rest))
                else:
                    gone.append((other.id, f"{name} is missing"))
            self.left = kept


def run_grid(
    job: Job,
    grid: Grid,
    store: Store,
    *,
    workers: int = 1,
    address: str | None = None,
    gpus_per_worker: float | None = None,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Runs every cell that is not finished; gives the reasons of those that cannot be had.

    workers: more than one, or an `address` of a Ray cluster, runs them through Ray.
    """
    progress = progress or Progress()
    agenda = Agenda(grid, store)
    if not agenda.left:
        return agenda.left_out
    with progress.bar("cells", len(grid.cells)) as bar:
        bar.advance(len(grid.cells) - len(agenda.left), "already done")
        if workers == 1 and address is None:
            _run_here(job, agenda, bar, progress)
        else:
            _run_with_ray(job, agenda, bar, progress, workers, address, gpus_per_worker)
    return agenda.left_out


def _run_here(job: Job, agenda: Agenda, bar: Bar, progress: Progress) -> None:
    share = _CellProgress(bar, progress)
    worker = Worker(job, share)
    worker.check(agenda.fingerprint, agenda.inputs)
    while (found := agenda.next()) is not None:
        cell, inputs = found
        share.begin(cell.id)
        try:
            result = worker.run(cell, inputs)
        except AllocMoEError as error:
            progress.note(f"{cell.id} is left out: {error}")
            agenda.fail(cell, str(error))
        else:
            agenda.finish(cell, result)
        share.end()


class _CellProgress(Progress):
    """Moves the bar of all cells by the share of the cell at hand that is done."""

    def __init__(self, bar: Bar, outer: Progress) -> None:
        self._bar, self._outer = bar, outer
        self._name, self._left = "", 0.0

    def begin(self, name: str) -> None:
        self._name, self._left = name, 1.0

    def end(self) -> None:
        self._bar.advance(self._left, self._name)

    def advance(self, share: float) -> None:
        # a cell may draw several bars; together they count as one
        share = min(share, self._left)
        self._left -= share
        self._bar.advance(share, self._name)

    @contextmanager
    def bar(self, label: str, total: float) -> Iterator[Bar]:
        yield _Part(self.advance, total)

    def note(self, line: str) -> None:
        self._outer.note(line)


@dataclass
class _Part:
    told: Callable[[float], None]
    total: float

    def advance(self, work: float, note: str = "") -> None:
        self.told(work / self.total if self.total else 0.0)


def _run_with_ray(
    job: Job,
    agenda: Agenda,
    bar: Bar,
    progress: Progress,
    workers: int,
    address: str | None,
    gpus: float | None,
) -> None:
    ray = _start_ray(workers, address)
    try:
        if gpus is None and job.device == "cpu":
            gpus = 0.0
        gpus = _gpus_each(ray.cluster_resources(), workers, gpus)
        kind = ray.remote(num_gpus=gpus, num_cpus=1)(Worker)
        idle = [kind.remote(job) for _ in range(workers)]
        try:
            ray.get([actor.check.remote(agenda.fingerprint, agenda.inputs) for actor in idle])
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        running: dict[Any, tuple[Cell, Any]] = {}
        while True:
            while idle and (found := agenda.next()) is not None:
                actor = idle.pop()
                running[actor.run.remote(*found)] = (found[0], actor)
            if not running:
                return
            (done,), _ = ray.wait([*running], num_returns=1)
            cell, actor = running.pop(done)
            try:
                result = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, AllocMoEError):
                    raise
                progress.note(f"{cell.id} is left out: {error.cause}")
                agenda.fail(cell, str(error.cause))
            except ray.exceptions.RayActorError:
                actor = kind.remote(job)
                if cell.id in agenda.died:
                    raise AllocMoEError(f"the worker of {cell.id} died twice") from None
                progress.note(f"the worker of {cell.id} died; another one takes its place")
                agenda.died.add(cell.id)
                agenda.left.insert(0, cell)
            else:
                agenda.finish(cell, result)
                bar.advance(1, cell.id)
            idle.append(actor)
    finally:
        ray.shutdown()


def _gpus_each(cluster: Mapping[str, float], workers: int, asked: float | None) -> float:
    """A worker that finds no room would be waited for without end."""
    there = cluster.get("GPU", 0.0)
    gpus = (1.0 if there >= 1 else 0.0) if asked is None else asked
    if workers * gpus > there:
        raise AllocMoEError(
            f"{workers} workers with {gpus:g} GPUs each need {workers * gpus:g}, Ray has "
            f"{there:g}: take fewer --workers or less --gpus-per-worker"
        )
    if workers > cluster.get("CPU", 0.0):
        raise AllocMoEError(f"Ray has {cluster.get('CPU', 0.0):g} processors for {workers} workers")
    return gpus


def _start_ray(workers: int, address: str | None) -> Any:
    try:
        import ray
    except ImportError:
        raise AllocMoEError(
            "several workers need Ray: pip install 'allocmoe[cluster]', or run one worker"
        ) from None
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options |= {"num_cpus": workers, "include_dashboard": False}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise AllocMoEError(f"Ray cannot be reached at {address}: {error}") from None
    return ray
