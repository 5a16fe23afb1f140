"""What the stages hand to each other: `Sensitivity`, `Plan`, `Evaluation` and so on, as JSON files.

Every artefact says which model and text it came from, so that a plan made for one model is refused
on another and a number can be traced to its run.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from allocmoe.codec import decode, encode, read_json, write_json
from allocmoe.errors import AllocMoEError

SCHEMA_VERSION = 1

# of a task with several
MAIN_METRICS = ("acc_norm", "acc", "exact_match")
# a budget is kept give or take half a percent
_KEPT = 1.005

Rule = Literal["none", "alloc-t", "naee", "dynamic-moe"]
Scope = Literal["batch", "sequence", "threshold"]
ContextName = Literal["paper", "single", "around"]
Normalisation = Literal["log", "relative", "raw"]
Method = Literal[
    "alloc-moe",
    "alloc-l",
    "alloc-t",
    "uniform",
    "ascending",
    "descending",
    "lexi",
    "naee",
    "dynamic-moe",
]


@dataclass(frozen=True)
class ModelInfo:
    """The model an artefact belongs to. `k_orig` and `num_experts` have one entry per MoE layer."""

    id: str
    revision: str | None
    family: str
    k_orig: tuple[int, ...]
    num_experts: tuple[int, ...]
    # of the weights; None where they were never loaded (a plan from the config alone)
    fingerprint: str | None

    def __post_init__(self) -> None:
        if not self.k_orig or len(self.k_orig) != len(self.num_experts):
            raise AllocMoEError(
                f"k_orig has {len(self.k_orig)} entries and num_experts {len(self.num_experts)}: "
                "each needs one per MoE layer"
            )
        for layer, (k, experts) in enumerate(zip(self.k_orig, self.num_experts, strict=True)):
            if not 1 <= k <= experts:
                raise AllocMoEError(f"k_orig {k} of {experts} experts in MoE layer {layer}")

    def difference(self, other: ModelInfo) -> str | None:
        """What makes a plan for `self` unusable on `other`, in words; None if nothing does."""
        if self.family != other.family:
            return f"family {self.family}, here {other.family}"
        if len(self.k_orig) != len(other.k_orig):
            return f"{len(self.k_orig)} MoE layers, here {len(other.k_orig)}"
        for name in ("k_orig", "num_experts"):
            for layer, (mine, theirs) in enumerate(
                zip(getattr(self, name), getattr(other, name), strict=True)
            ):
                if mine != theirs:
                    return f"{name} {mine} in MoE layer {layer}, here {theirs}"
        return None


@dataclass(frozen=True)
class TextInfo:
    """The text a number was measured on. `sha256` is of the token ids that were really used."""

    source: str
    sha256: str
    num_sequences: int
    sequence_length: int


@dataclass(frozen=True)
class TokenRule:
    """Which of a token's `k_orig` experts run.

    `thresholds` has one entry per MoE layer: the score threshold of alloc-t in threshold scope,
    NAEE's beta, or Dynamic-MoE's p (the same in every layer). `renormalise_over` is the size k2 of
    the reference set in families that renormalise; None renormalises over the kept experts.
    """

    rule: Rule = "none"
    scope: Scope | None = None
    k_base: int = 1
    thresholds: tuple[float, ...] | None = None
    renormalise_over: int | None = None

    def __post_init__(self) -> None:
        if self.k_base < 0:
            raise AllocMoEError(f"k_base must be 0 or more, not {self.k_base}")
        if self.renormalise_over is not None and self.renormalise_over < 1:
            raise AllocMoEError(f"renormalise_over must be 1 or more, not {self.renormalise_over}")
        if (self.rule == "alloc-t") != (self.scope is not None):
            raise AllocMoEError(
                f"the rule {self.rule} and the scope {self.scope} do not go together"
            )
        if self.needs_thresholds != (self.thresholds is not None):
            word = "needs" if self.needs_thresholds else "takes no"
            raise AllocMoEError(f"the rule {self.label} {word} thresholds")

    @property
    def needs_thresholds(self) -> bool:
        return self.rule in ("naee", "dynamic-moe") or self.scope == "threshold"

    @property
    def selects(self) -> bool:
        """Whether something is decided after the router; otherwise its own top-k is all."""
        return self.rule != "none" or self.renormalise_over is not None

    @property
    def label(self) -> str:
        return self.rule if self.scope is None else f"{self.rule}/{self.scope}"


@dataclass(frozen=True)
class Context:
    """What the other layers do while one is profiled.

    `before` and `after` give the activations per token of each MoE layer when it comes before or
    after the layer under test: `paper` has (k_orig, 1), `single` (k_orig, k_orig), `around` the
    uniform split of one budget on both sides.
    """

    name: ContextName
    before: tuple[float, ...]
    after: tuple[float, ...]


def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    versions |= {name: version_of(name) for name in ("allocmoe", "torch", "transformers", "numpy")}
    commit = source_commit()
    return versions | ({"commit": commit} if commit else {})


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def source_commit() -> str | None:
    """Of a checkout; ALLOCMOE_COMMIT says it where the files came without their history."""
    if "ALLOCMOE_COMMIT" in os.environ:
        return os.environ["ALLOCMOE_COMMIT"]
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A dataclass with a `kind`, a schema version and a provenance, kept as one JSON file."""

    KIND: ClassVar[str]

    model: ModelInfo
    text: TextInfo | None
    versions: dict[str, str] = field(default_factory=package_versions)
    created: str = field(default_factory=now)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.KIND, "schema_version": SCHEMA_VERSION, **encode(self)}

    def save(self, path: str | Path) -> None:
        write_json(Path(path), self.to_json())

    @classmethod
    def from_json(cls, data: Any, where: str) -> Self:
        if not isinstance(data, dict):
            raise AllocMoEError(f"{where}: expected an object")
        body = dict(data)
        kind, version = body.pop("kind", None), body.pop("schema_version", None)
        if kind != cls.KIND:
            raise AllocMoEError(f"{where}: kind is {kind!r}, expected {cls.KIND!r}")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise AllocMoEError(
                f"{where}: schema_version is {version!r}, this allocmoe reads {SCHEMA_VERSION}"
            )
        # keys that came later are not in earlier files
        body = {f.name: None for f in fields(cls) if f.default is None} | body
        return decode(cls, body, where)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        return cls.from_json(read_json(Path(path)), str(path))


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Artifact):
    """S[l, k]: the calibration perplexity with MoE layer l at k activations per token.

    `ks[l]` is the grid of k that was measured, `perplexity[l][j]` belongs to `ks[l][j]`. The last
    entry of each `ks[l]` is the layer's own k_orig.
    """

    KIND: ClassVar[str] = "allocmoe.sensitivity"

    context: Context
    token: TokenRule
    ks: tuple[tuple[float, ...], ...]
    perplexity: tuple[tuple[float, ...], ...]
    # of the unmodified model on the same text
    base_perplexity: float
    seconds: float
    # of the model as it ran; None in files from before these were kept
    dtype: str | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        num_layers = len(self.model.k_orig)
        for name, rows in (
            ("ks", self.ks),
            ("perplexity", self.perplexity),
            ("context.before", self.context.before),
            ("context.after", self.context.after),
        ):
            if len(rows) != num_layers:
                raise AllocMoEError(f"{name} has {len(rows)} rows for {num_layers} MoE layers")
        for layer, (ks, row) in enumerate(zip(self.ks, self.perplexity, strict=True)):
            if len(ks) != len(row):
                raise AllocMoEError(f"ks and perplexity differ in length in MoE layer {layer}")
            rises = list(ks) == sorted({k for k in ks if k > 0})
            if not ks or not rises or ks[-1] != self.model.k_orig[layer]:
                raise AllocMoEError(f"ks of MoE layer {layer} must rise to its k_orig: {list(ks)}")
            if min(row) <= 0:
                raise AllocMoEError(f"a perplexity of MoE layer {layer} is not positive")

    def cost(self, normalisation: Normalisation = "log") -> list[list[float]]:
        """The loss of each entry against its row at k_orig.

        log: log S[l,k] - log S[l,K], whose column k=1 telescopes in the paper's context;
        relative: S[l,k] / S[l,K] - 1; raw: S[l,k] - S[l,K].
        """
        if normalisation == "log":
            return [[math.log(s) - math.log(row[-1]) for s in row] for row in self.perplexity]
        if normalisation == "relative":
            return [[s / row[-1] - 1 for s in row] for row in self.perplexity]
        return [[s - row[-1] for s in row] for row in self.perplexity]


@dataclass(frozen=True, kw_only=True)
class Plan(Artifact):
    """How many experts each layer, and each token in it, may run. The portable result."""

    KIND: ClassVar[str] = "allocmoe.plan"

    method: Method
    layer_budgets: tuple[float, ...]
    token: TokenRule
    # as the user wrote it, and as activations per token over all MoE layers
    budget_asked: str
    budget: int
    budget_used: float
    # in units of the normalisation; None where the method predicts nothing
    predicted_loss: float | None
    normalisation: Normalisation | None
    # the context of the sensitivity it was solved from, if any
    context: ContextName | None
    # of the thresholds, where `text` is that of the sensitivity
    threshold_text: TextInfo | None = None

    def __post_init__(self) -> None:
        k_orig = self.model.k_orig
        if len(self.layer_budgets) != len(k_orig):
            raise AllocMoEError(
                f"layer_budgets has {len(self.layer_budgets)} entries for {len(k_orig)} MoE layers"
            )
        for layer, (budget, k) in enumerate(zip(self.layer_budgets, k_orig, strict=True)):
            if not 0 < budget <= k:
                raise AllocMoEError(f"layer_budgets[{layer}] is {budget}, outside 0..{k}")
            if self.token.rule == "none" and budget != int(budget):
                raise AllocMoEError(
                    f"layer_budgets[{layer}] is {budget}: without a token rule it must be whole"
                )
        thresholds = self.token.thresholds
        if thresholds is not None and len(thresholds) != len(k_orig):
            raise AllocMoEError(
                f"token.thresholds has {len(thresholds)} entries for {len(k_orig)} MoE layers"
            )
        if self.budget_used > self.budget + 1e-6:
            raise AllocMoEError(f"budget_used {self.budget_used} exceeds the budget {self.budget}")
        if abs(sum(self.layer_budgets) - self.budget_used) > 1e-6:
            raise AllocMoEError("budget_used is not the sum of layer_budgets")

    def check_fits(self, model: ModelInfo) -> None:
        difference = self.model.difference(model)
        if difference is not None:
            raise AllocMoEError(
                f"this plan was made for {self.model.id} and does not fit {model.id}: {difference}"
            )


@dataclass(frozen=True)
class LayerActivity:
    """What really ran in one MoE layer, counted. `tokens` excludes padding.

    `distinct_experts` adds up the experts that each forward touched. `distinct_at_positions` adds
    up those that each position of the sequences touched together: what a decode step loads that
    takes every sequence one token further.
    """

    tokens: int
    activations: int
    padding_activations: int
    distinct_experts: int
    forwards: int
    distinct_at_positions: int
    positions: int

    @property
    def mean(self) -> float:
        return self.activations / self.tokens if self.tokens else 0.0

    @property
    def distinct_per_forward(self) -> float:
        return self.distinct_experts / self.forwards if self.forwards else 0.0

    @property
    def distinct_per_step(self) -> float:
        return self.distinct_at_positions / self.positions if self.positions else 0.0

    def __add__(self, other: LayerActivity) -> LayerActivity:
        return LayerActivity(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(LayerActivity))
        )


@dataclass(frozen=True)
class Quality:
    """One plan on one text: its loss, how far it is from the unmodified model, what it ran.

    `kl` is the mean KL(unmodified || plan) in nats a token, `top1_agreement` the share of tokens
    with the same most likely next token, `log_rise` the rise of the log-perplexity.
    `distinct_per_step` counts the distinct experts of each layer that a decode step loads which
    takes every sequence of a batch one token further.
    """

    name: str
    method: str
    token: str
    budget: float
    perplexity: float
    log_rise: float
    # None where the engine tells no whole distributions
    kl: float | None
    top1_agreement: float
    realised: float
    realised_per_layer: tuple[float, ...]
    distinct_per_step: tuple[float, ...]

    @property
    def keeps_budget(self) -> bool:
        return self.realised <= _KEPT * self.budget


def best_quality(rows: Sequence[Quality]) -> Quality:
    """Of rows at one budget, the one with the lowest perplexity that keeps it.

    Thresholds drift on other text, and who runs more has it easy. Where no row keeps the budget,
    those are compared that exceed it least.
    """
    most = _KEPT * max(rows[0].budget, min(row.realised for row in rows))
    return min((row for row in rows if row.realised <= most), key=lambda row: row.perplexity)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Artifact):
    """Qualities of several plans on one model and one text; the first row is the unmodified one."""

    KIND: ClassVar[str] = "allocmoe.evaluation"

    batch_size: int
    rows: tuple[Quality, ...]

    def __post_init__(self) -> None:
        if self.text is None:
            raise AllocMoEError("text is null: an evaluation is on a text")
        if not self.rows:
            raise AllocMoEError("rows is empty")
        num_layers = len(self.model.k_orig)
        for row in self.rows:
            for name in ("realised_per_layer", "distinct_per_step"):
                if (found := len(getattr(row, name))) != num_layers:
                    raise AllocMoEError(
                        f"{name} of {row.name} has {found} entries for {num_layers} MoE layers"
                    )

    @property
    def sequences_a_step(self) -> int:
        """How many sequences a decode step of `distinct_per_step` takes one token further."""
        assert self.text is not None
        return min(self.batch_size, self.text.num_sequences)


@dataclass(frozen=True)
class Score:
    """One metric of a task; None where lm-eval gives no finite number, or no direction."""

    value: float | None
    stderr: float | None
    higher_is_better: bool | None


@dataclass(frozen=True)
class TaskResult:
    """One plan on one task, or on a group of tasks that lm-eval scores as one.

    `scores` has lm-eval's own names, followed by the filter where a task filters answers
    (`exact_match,strict-match`). `shots` is None where the tasks of a group differ in it.
    """

    task: str
    num_items: int
    shots: int | None
    scores: dict[str, Score]
    realised: float
    realised_per_layer: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.scores:
            raise AllocMoEError(f"the task {self.task} has no scores")

    @property
    def main(self) -> str:
        """The metric that tables show: the usual ones first, else what the task lists first."""
        known = [n for m in MAIN_METRICS for n in self.scores if n.partition(",")[0] == m]
        return [*known, *self.scores][0]


@dataclass(frozen=True)
class TaskRow:
    """One plan on all tasks."""

    name: str
    method: str
    token: str
    budget: float
    tasks: tuple[TaskResult, ...]


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation(Artifact):
    """Scores of several plans on tasks of lm-eval; the first row is the unmodified model.

    `limit` is the number of items that each task was cut to, None if to none.
    """

    KIND: ClassVar[str] = "allocmoe.task-evaluation"

    batch_size: int
    limit: int | None
    rows: tuple[TaskRow, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise AllocMoEError("rows is empty")
        asked = [result.task for result in self.rows[0].tasks]
        for row in self.rows:
            if [result.task for result in row.tasks] != asked:
                raise AllocMoEError(f"{row.name} and {self.rows[0].name} ran different tasks")


@dataclass(frozen=True)
class LayerAnalysis:
    """How a plan changes the expert load of one MoE layer, and whom its token rule favours.

    Loads are shares of the layer's activations, one per expert. `spearman` is the rank correlation
    of the two loads, the entropies are divided by log(experts), `js_divergence` is in nats.
    `entropy_correlation` is the rank correlation over tokens of the experts kept with the entropy
    of the routing; None where every token keeps the same number. `kept_by_entropy` has a row
    (mean entropy, mean experts kept, tokens) for each tenth of the tokens by entropy.
    """

    load_before: tuple[float, ...]
    load_after: tuple[float, ...]
    spearman: float
    entropy_before: float
    entropy_after: float
    js_divergence: float
    entropy_correlation: float | None
    kept_by_entropy: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SweepRow:
    """One setting of a sweep, measured: the value swept, what it cost, what it ran."""

    value: str
    perplexity: float
    log_rise: float
    realised: float
    layer_budgets: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Analysis(Artifact):
    """The paper's analyses of one plan on one text."""

    KIND: ClassVar[str] = "allocmoe.analysis"

    name: str
    method: Method
    budget: int
    token: str
    layer_budgets: tuple[float, ...]
    realised_per_layer: tuple[float, ...]
    layers: tuple[LayerAnalysis, ...]
    k_base_sweep: tuple[SweepRow, ...]
    text_sweep: tuple[SweepRow, ...]


@dataclass(frozen=True)
class Protocol:
    """What a benchmark does: batches of random tokens, prefilled, then decoded greedily.

    The decode follows the first prompt length; further lengths are prefilled only.
    """

    batch_size: int = 8
    prompt_lengths: tuple[int, ...] = (32,)
    decode_tokens: int = 128
    warmups: int = 5
    runs: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("prompt_lengths", min(self.prompt_lengths, default=0), 2),
            ("decode_tokens", self.decode_tokens, 1),
            ("warmups", self.warmups, 0),
            ("runs", self.runs, 1),
            ("seed", self.seed, 0),
        ):
            if value < least:
                raise AllocMoEError(f"{name} must be {least} or more, not {value}")
        if len({*self.prompt_lengths}) < len(self.prompt_lengths):
            raise AllocMoEError("a prompt length is given twice")


@dataclass(frozen=True)
class Machine:
    """Where a benchmark ran. `gpu` is None where it ran on the processor."""

    processor: str
    threads: int
    gpu: str | None
    system: str


@dataclass(frozen=True)
class Timing:
    """Milliseconds of every timed run, and their spread."""

    median_ms: float
    min_ms: float
    max_ms: float
    runs_ms: tuple[float, ...]

    @classmethod
    def of(cls, runs_ms: Sequence[float]) -> Timing:
        return cls(statistics.median(runs_ms), min(runs_ms), max(runs_ms), tuple(runs_ms))


@dataclass(frozen=True)
class Prefill:
    """One pass over the prompts. `speedup` is over the unmodified model, `captured` says whether
    it was replayed as a CUDA graph; a long prompt is not, it keeps a GPU busy without."""

    prompt_length: int
    captured: bool
    time: Timing
    speedup: float
    realised_per_layer: tuple[float, ...]


@dataclass(frozen=True)
class Decode:
    """A step that takes every sequence one token further.

    `step` is its time; `experts` that of the routed experts of all layers alone, on the inputs of
    one real step; `rest_ms` is what remains of the medians. `floor_bytes` is what a step must read:
    the parameters, of the experts those that it runs, and the key/value cache in mid-decode;
    `floor_ms` is the time this takes at the copy bandwidth, `times_floor` the step's over it.
    """

    compiled: bool
    captured: bool
    step: Timing
    speedup: float
    tokens_per_second: float
    experts: Timing
    rest_ms: float
    realised_per_layer: tuple[float, ...]
    distinct_per_step: tuple[float, ...]
    floor_bytes: int
    floor_ms: float
    times_floor: float


@dataclass(frozen=True)
class Speed:
    """One plan, timed. `experts` is the experts implementation that ran, by its name in
    transformers."""

    name: str
    method: str
    token: str
    budget: float
    experts: str
    prefill: tuple[Prefill, ...]
    decode: Decode


@dataclass(frozen=True, kw_only=True)
class Benchmark(Artifact):
    """Speeds of several plans on one model and one machine.

    The first row is the unmodified model. It was timed again after all others: the drift, `again /
    before - 1`, tells how much of a difference is noise. `fused` says whether the experts
    implementation `allocmoe` ran its fused kernel.
    """

    KIND: ClassVar[str] = "allocmoe.benchmark"

    protocol: Protocol
    machine: Machine
    command: str | None
    dtype: str
    random_weights: bool
    fused: bool
    # read and written, of a large copy on the device
    copy_bytes_per_second: float
    prefill_drift: float
    decode_drift: float
    rows: tuple[Speed, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise AllocMoEError("rows is empty")
        for row in self.rows:
            lengths = tuple(prefill.prompt_length for prefill in row.prefill)
            if lengths != self.protocol.prompt_lengths:
                raise AllocMoEError(
                    f"{row.name} was prefilled at {list(lengths)}, not at "
                    f"{list(self.protocol.prompt_lengths)}"
                )


KINDS: dict[str, type[Artifact]] = {
    kind.KIND: kind for kind in (Sensitivity, Plan, Evaluation, TaskEvaluation, Analysis, Benchmark)
}


def load_artifact(path: str | Path) -> Artifact:
    """Whatever artefact the file holds."""
    data = read_json(Path(path))
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise AllocMoEError(
            f"{path}: not an allocmoe artefact (kind {kind!r}; known: {', '.join(KINDS)})"
        )
    return KINDS[kind].from_json(data, str(path))
