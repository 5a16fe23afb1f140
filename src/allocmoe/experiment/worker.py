"""Runs cells. A worker loads the model once and keeps it; results go back as plain JSON, so that a
worker on another machine needs nothing but the package, the model and the data."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import metadata
from os.path import normpath
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from allocmoe.artifacts import Plan, Sensitivity, now, package_versions
from allocmoe.bench.benchmark import benchmark
from allocmoe.bench.machine import describe_machine
from allocmoe.codec import encode
from allocmoe.errors import AllocMoEError
from allocmoe.evaluation.analysis import analyze
from allocmoe.evaluation.quality import UNMODIFIED, evaluate
from allocmoe.evaluation.tasks import Hits, TaskRunner, Tasks, load_tasks
from allocmoe.experiment.grid import Cell
from allocmoe.experiment.settings import Settings, TextSettings
from allocmoe.experiment.task_files import prepare_tasks
from allocmoe.models import MoEModel, inspect_model
from allocmoe.models.load import load_model, load_tokenizer
from allocmoe.planning.methods import Planner
from allocmoe.profiling.profile import profile
from allocmoe.progress import Progress
from allocmoe.runtime.engine import Engine
from allocmoe.runtime.hf import use_kernel
from allocmoe.text import Text, check_disjoint, load_text

Result = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """An experiment on one model, all that a worker has to know.

    engine: what runs profiles, texts and tasks; plans, analyses and times are transformers' in any
    case. max_length: of a task's input, for the engine vllm. texts: files or other sources instead
    of the settings' own. data: a folder of task files, None for the hub. scratch: where a profile
    keeps its finished rows; None for a folder of its own.
    """

    settings: Settings
    model: str
    weights: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "auto"
    experts: Literal["allocmoe", "stock"] = "allocmoe"
    engine: Literal["transformers", "vllm"] = "transformers"
    engine_options: dict[str, Any] = field(default_factory=dict)
    max_length: int = 4096
    data: str | None = None
    texts: dict[str, str] = field(default_factory=dict)
    threads: int | None = None
    scratch: str | None = None
    command: str | None = None

    def identity(self) -> Result:
        """What makes results belong together; where and how fast they are made does not."""
        how = ("device", "threads", "scratch", "trust_remote_code", "command")
        found = {name: value for name, value in encode(self).items() if name not in how}
        return plain_paths(found)

    def source(self, text: TextSettings) -> str:
        return self.texts.get(text.name, text.source)


def plain_paths(identity: Result) -> Result:
    """`data/` and `./data` are `data`."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(source) for name, source in value.items()}
        return normpath(value) if isinstance(value, str) else value

    paths = ("weights", "data", "texts")
    return {name: plain(value) if name in paths else value for name, value in identity.items()}


# what a cell reads: the calibration or measurement text with its number and seed, or a task
Input = tuple[Literal["calibration", "measurement", "task"], int | str, int]


def input_of(cell: Cell, result: Result) -> tuple[Input, str] | None:
    """What a finished cell read, and its sha256 if the result tells."""
    reads: dict[str, Input] = {
        "profile": ("calibration", cell.text, cell.seed),
        "text": ("measurement", cell.text, cell.seed),
        "analysis": ("measurement", cell.text, cell.seed),
        "task": ("task", cell.task, 0),
    }
    if cell.kind == "plan" and cell.plan is not None:
        reads["plan"] = ("calibration", cell.plan.text, cell.plan.seed)
    sha256 = result.get("data") or (result.get("text") or {}).get("sha256")
    return (reads[cell.kind], sha256) if cell.kind in reads and sha256 else None


class Worker:
    """Runs cells of one job, one after the other."""

    def __init__(self, job: Job, progress: Progress | None = None) -> None:
        self.job, self.progress = job, progress or Progress()
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        self._planners: dict[tuple[int, int, int], Planner] = {}
        self._kept: dict[Any, Any] = {}

    def check(
        self, fingerprint: str | None, inputs: Mapping[Input, tuple[str, str]] | None = None
    ) -> None:
        """Refuses weights and texts other than those that earlier cells were measured on.

        inputs: what was read, with a cell that did and the sha256.
        """
        if self.job.engine == "transformers" and fingerprint not in (
            None,
            self.moe.info.fingerprint,
        ):
            raise AllocMoEError(
                f"{self.job.weights} has other weights than those that the finished cells were "
                "measured on: choose another folder"
            )
        for (kind, number, seed), (cell, sha256) in (inputs or {}).items():
            if kind == "task":  # compared when it is run: reading all would take long
                continue
            load = self._calibration if kind == "calibration" else self._measured
            try:
                found = load(int(number), seed).info
            except AllocMoEError:  # told by the cells that need it
                continue
            if found.sha256 != sha256:
                raise AllocMoEError(
                    f"{found.source} has other text than what {cell} was measured on: give the "
                    "same text as before, or choose another folder"
                )

    def run(self, cell: Cell, inputs: Mapping[str, Result]) -> Result:
        """The result of a cell with its provenance. inputs: the results of the cells it needs."""
        work: dict[str, Callable[[Cell, Mapping[str, Result]], Result]] = {
            "profile": self._profile,
            "plan": self._plan,
            "text": self._text,
            "task": self._task,
            "analysis": self._analysis,
            "speed": self._speed,
        }
        began = time.perf_counter()
        result = work[cell.kind](cell, inputs)
        return {
            "seconds": round(time.perf_counter() - began, 3),
            "created": now(),
            "command": self.job.command,
            "machine": asdict(describe_machine(self._device)),
            "versions": package_versions() | _harness(cell),
            "result": result,
        }

    @cached_property
    def moe(self) -> MoEModel:
        job = self.job
        model = load_model(
            job.weights,
            dtype=job.dtype,
            device=job.device,
            revision=job.revision,
            trust_remote_code=job.trust_remote_code,
        )
        if job.experts == "allocmoe":
            use_kernel(model)
        return inspect_model(model)

    @cached_property
    def _engine(self) -> nn.Module | Engine:
        job = self.job
        if job.engine == "transformers":
            return self.moe.model
        from allocmoe.runtime.vllm.engine import VllmEngine

        return VllmEngine(
            job.weights,
            max_length=max(job.max_length, job.settings.calibration.length),
            dtype=job.dtype,
            revision=job.revision,
            trust_remote_code=job.trust_remote_code,
            tokenizes=True,
            options=job.engine_options,
        )

    @property
    def _device(self) -> torch.device:
        if self.job.engine == "transformers":
            return next(self.moe.model.parameters()).device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def _tokenizer(self) -> Any:
        job = self.job
        return load_tokenizer(
            job.weights, revision=job.revision, trust_remote_code=job.trust_remote_code
        )

    def _calibration(self, text: int, seed: int) -> Text:
        settings = self.job.settings.calibration
        return self._load(settings.texts[text], settings.sequences, seed)

    def _measured(self, text: int, seed: int) -> Text:
        settings = self.job.settings.measurement
        return self._load(settings.texts[text], settings.sequences, seed)

    def _load(self, text: TextSettings, sequences: int, seed: int) -> Text:
        """Every part and seed has sequences of its own."""
        return self._keep(
            (text, sequences, seed),
            lambda: load_text(
                self.job.source(text),
                self._tokenizer,
                sequences=sequences,
                length=self.job.settings.calibration.length,
                skip=(text.part * self.job.settings.seeds + seed) * sequences,
            ),
        )

    def _keep(self, key: Any, load: Callable[[], T]) -> T:
        """Loads once, for many cells read the same; what cannot be had is not asked for again."""
        if key not in self._kept:
            try:
                self._kept[key] = load()
            except AllocMoEError as error:
                self._kept[key] = error
        found = self._kept[key]
        if isinstance(found, AllocMoEError):
            raise AllocMoEError(str(found))
        return cast(T, found)

    def _profile(self, cell: Cell, inputs: Mapping[str, Result]) -> Result:
        return profile(
            self._engine,
            self._calibration(cell.text, cell.seed),
            context=self.job.settings.calibration.contexts[cell.context],
            batch_size=self.job.settings.calibration.batch_size,
            save_to=self._scratch / f"{cell.id}.json",
            resume=True,
            progress=self.progress,
        ).to_json()

    def _plan(self, cell: Cell, inputs: Mapping[str, Result]) -> Result:
        plan = cell.plan
        assert plan is not None
        planner = self._planner(plan.text, plan.seed, plan.k_base)
        for found in inputs.values():
            planner = replace(planner, sensitivity=Sensitivity.from_json(found, cell.id))
        return planner.plan(plan.method, plan.budget).to_json()

    def _planner(self, text: int, seed: int, k_base: int) -> Planner:
        """Kept, for what it measures of a model is the same for all budgets."""
        key = (text, seed, k_base)
        if key not in self._planners:
            self._planners[key] = Planner(
                self.moe.info,
                model=self.moe.model,
                text=self._calibration(text, seed),
                scope=self.job.settings.scope,
                k_base=k_base,
                batch_size=self.job.settings.calibration.batch_size,
                progress=self.progress,
            )
        return self._planners[key]

    def _text(self, cell: Cell, inputs: Mapping[str, Result]) -> Result:
        text = self._measured(cell.text, cell.seed)
        for number in range(len(self.job.settings.calibration.texts)):
            # the sweep over texts is of seed 0
            check_disjoint(self._calibration(number, 0 if number else cell.seed), text)
        return evaluate(
            self._engine,
            _plans(inputs),
            text,
            batch_size=self.job.settings.calibration.batch_size,
            progress=self.progress,
        ).to_json()

    def _task(self, cell: Cell, inputs: Mapping[str, Result]) -> Result:
        plans = _plans(inputs)
        plan = next(iter(plans.values()), None)
        settings = self.job.settings.tasks
        hits: Hits = {}
        tasks, data = self._keep(cell.task, lambda: _load_task(cell.task, self.job, self._scratch))
        with self.progress.bar(cell.id, 1) as bar:
            result = self._runner.run(
                cell.task,
                tasks,
                plan,
                limit=settings.limit or None,
                on_share=bar.advance,
                note=self.progress.note if plan is None else lambda line: None,
                on_hits=hits.update,
            )
        label = next(iter(plans), UNMODIFIED)
        return {"plan": label, **encode(result), "hits": hits, "data": data}

    @cached_property
    def _runner(self) -> TaskRunner:
        return TaskRunner(
            self._engine, self._tokenizer, batch_size=self.job.settings.tasks.batch_size
        )

    @cached_property
    def _scratch(self) -> Path:
        if self.job.scratch is not None:
            return Path(self.job.scratch)
        self._temporary = tempfile.TemporaryDirectory()
        return Path(self._temporary.name)

    def _analysis(self, cell: Cell, inputs: Mapping[str, Result]) -> Result:
        ((name, plan),) = _plans(inputs).items()
        return analyze(
            self.moe.model,
            plan,
            self._measured(0, cell.seed),
            name=name,
            batch_size=self.job.settings.calibration.batch_size,
            progress=self.progress,
        ).to_json()

    def _speed(self, cell: Cell, inputs: Mapping[str, Result]) -> Result:
        return benchmark(
            self.moe.model,
            _plans(inputs),
            protocol=self.job.settings.speed,
            experts=self.job.experts,
            command=self.job.command,
            progress=self.progress,
        ).to_json()


def _load_task(name: str, job: Job, scratch: Path) -> tuple[Tasks, str]:
    """With the sha256 of the items that are evaluated."""
    folder = scratch / "tasks" / name
    prepared = prepare_tasks([name], None if job.data is None else Path(job.data), folder)
    for reason in prepared.missing.values():
        raise AllocMoEError(reason)
    most = job.settings.tasks.answer_tokens or None
    tasks = load_tasks([name], folder, answer_tokens=most)
    digest = hashlib.sha256()
    for found in tasks.values():
        for task in found["tasks"].values():
            for item in task.eval_docs:
                digest.update(json.dumps(item, sort_keys=True, default=str).encode())
    return tasks, digest.hexdigest()


def _harness(cell: Cell) -> dict[str, str]:
    return {"lm-eval": metadata.version("lm-eval")} if cell.kind == "task" else {}


def _plans(inputs: Mapping[str, Result]) -> dict[str, Plan]:
    """Plans by their labels, from the results of plan cells."""
    return {
        name.removeprefix("plan-"): Plan.from_json(found, name) for name, found in inputs.items()
    }
