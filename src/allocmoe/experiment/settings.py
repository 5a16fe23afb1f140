"""What an experiment is made of, as its TOML file says it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allocmoe.artifacts import ContextName, Method, Protocol, Scope
from allocmoe.codec import decode
from allocmoe.errors import AllocMoEError

# of an installed package, or of a checkout
_FOLDERS = (Path(__file__).parent / "files", Path(__file__).parents[3] / "experiments")


@dataclass(frozen=True)
class TextSettings:
    """A text by the name that tables use. A source can give several: `part` counts them."""

    name: str
    source: str
    part: int


@dataclass(frozen=True)
class Calibration:
    """The first text and context are the main ones, the others are for sweeps over them.

    contexts: what the other layers do while one is profiled.
    """

    texts: tuple[TextSettings, ...]
    contexts: tuple[ContextName, ...]
    sequences: int
    length: int
    batch_size: int

    def __post_init__(self) -> None:
        _check_names(self.texts)
        _at_least(1, sequences=self.sequences, batch_size=self.batch_size)
        _at_least(2, length=self.length)
        if not self.texts:
            raise AllocMoEError("there is no text to calibrate on")
        if not self.contexts or len({*self.contexts}) < len(self.contexts):
            raise AllocMoEError(f"contexts must be one or more, each once: {self.contexts}")
        if "around" in self.contexts:
            raise AllocMoEError("the context around has a budget of its own: take paper or single")


@dataclass(frozen=True)
class Measurement:
    """Texts to measure the perplexity on; their sequences are as long as those of calibration."""

    texts: tuple[TextSettings, ...]
    sequences: int

    def __post_init__(self) -> None:
        _check_names(self.texts)
        _at_least(1, sequences=self.sequences)


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise AllocMoEError(f"{name} must be {least} or more, not {value}")


def _check_names(texts: tuple[TextSettings, ...]) -> None:
    if len({text.name for text in texts}) < len(texts):
        raise AllocMoEError("two texts have the same name")


@dataclass(frozen=True)
class TaskSettings:
    """A task by the name that tables use, by lm-eval's, and the metric that counts."""

    name: str
    task: str
    metric: str


@dataclass(frozen=True)
class Tasks:
    """limit: items of each task, 0 for all. answer_tokens: the most that an answer may have, 0 for
    the task's own. seeds: how many of the seeds are run on tasks. sweeps: whether the sweeps are
    made on tasks too."""

    batch_size: int
    limit: int
    answer_tokens: int
    seeds: int
    sweeps: bool
    groups: dict[str, tuple[TaskSettings, ...]]

    def __post_init__(self) -> None:
        _at_least(1, batch_size=self.batch_size, seeds=self.seeds)
        _at_least(0, limit=self.limit, answer_tokens=self.answer_tokens)

    def all(self) -> list[TaskSettings]:
        return [task for group in self.groups.values() for task in group]


@dataclass(frozen=True)
class Published:
    """Numbers to stand beside ours, in the order of the budgets. speedup: of prefill and decode at
    half the budget, or none."""

    speedup: dict[str, float]
    ablation: dict[str, tuple[float, ...]]
    k_base: dict[str, tuple[float, ...]]
    calibration: dict[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        if self.speedup and {*self.speedup} != {"prefill", "decode"}:
            raise AllocMoEError(
                f"speedup must have prefill and decode, or nothing, not {', '.join(self.speedup)}"
            )

    def check_rows(self, num_budgets: int) -> None:
        for table in ("ablation", "k_base", "calibration"):
            for name, row in getattr(self, table).items():
                if len(row) != num_budgets:
                    raise AllocMoEError(
                        f"published: {table}.{name} has {len(row)} numbers for {num_budgets} "
                        "budgets"
                    )


@dataclass(frozen=True)
class ModelSettings:
    """budgets: activations a token, of `full`; analyses are made at `half`, one of them."""

    name: str
    id: str
    full: int
    budgets: tuple[int, ...]
    half: int
    published: Published

    def __post_init__(self) -> None:
        _at_least(1, full=self.full)
        for budget in self.budgets:
            if not 1 <= budget <= self.full:
                raise AllocMoEError(f"a budget must be 1 to {self.full} (full), not {budget}")
        if len({*self.budgets}) < len(self.budgets):
            raise AllocMoEError("a budget is named twice")
        if self.half not in self.budgets:
            raise AllocMoEError(f"half is {self.half}, which is none of the budgets")
        self.published.check_rows(len(self.budgets))


@dataclass(frozen=True)
class Quick:
    """What --quick takes instead."""

    weights: str
    seeds: int
    limit: int
    answer_tokens: int
    calibration: Calibration
    measurement: Measurement
    speed: Protocol

    def __post_init__(self) -> None:
        _at_least(1, seeds=self.seeds)
        _at_least(0, limit=self.limit, answer_tokens=self.answer_tokens)


@dataclass(frozen=True)
class Settings:
    """An experiment for several models. timed: the methods whose speed is measured."""

    title: str
    methods: tuple[Method, ...]
    timed: tuple[Method, ...]
    scope: Scope
    seeds: int
    calibration: Calibration
    measurement: Measurement
    tasks: Tasks
    speed: Protocol
    models: dict[str, ModelSettings]
    quick: Quick

    def __post_init__(self) -> None:
        _at_least(1, seeds=self.seeds)
        for name in ("methods", "timed"):
            found = getattr(self, name)
            if len({*found}) < len(found):
                raise AllocMoEError(f"{name}: a method is named twice")

    def quickened(self) -> Settings:
        quick = self.quick
        return replace(
            self,
            seeds=quick.seeds,
            calibration=quick.calibration,
            measurement=quick.measurement,
            tasks=replace(self.tasks, limit=quick.limit, answer_tokens=quick.answer_tokens),
            speed=quick.speed,
        )

    def model(self, name: str) -> ModelSettings:
        if name not in self.models:
            raise AllocMoEError(
                f"the experiment has no model {name!r}; it has {', '.join(self.models)}"
            )
        return self.models[name]


def load_settings(name: str) -> Settings:
    """The experiment of that name, or in that file."""
    path = Path(name) if name.endswith(".toml") else experiment_file(f"{name}.toml")
    if path is None or not path.is_file():
        raise AllocMoEError(
            f"there is no experiment {name!r}; known: {', '.join(known_experiments())}, or a "
            ".toml file"
        )
    try:
        data: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise AllocMoEError(f"{path}: {error}") from None
    return decode(Settings, data, str(path))


def experiment_file(name: str) -> Path | None:
    """A file or folder that comes with the experiments."""
    return next((f / name for f in _FOLDERS if (f / name).exists()), None)


def known_experiments() -> list[str]:
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.toml")})
