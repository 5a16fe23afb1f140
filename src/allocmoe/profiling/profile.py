"""The sensitivity matrix of Algorithm 1, exactly, at a fraction of its cost.

S[l, k] is the perplexity with MoE layer l at k, the layers before it at `context.before` and those
after it at `context.after`. The layers before l are the same for all entries of its row and of all
later rows, so the text waits in front of layer l while the row is measured, and then moves on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from allocmoe.artifacts import Context, ContextName, ModelInfo, Sensitivity, TokenRule
from allocmoe.codec import check_writable, decode, encode, read_json, write_json
from allocmoe.errors import AllocMoEError
from allocmoe.models import MoEModel, inspect_model
from allocmoe.profiling.measurers import EngineMeasurer, Measurer, WalkMeasurer
from allocmoe.profiling.ranks import Ranks, current_ranks
from allocmoe.progress import Progress
from allocmoe.runtime.engine import Engine
from allocmoe.runtime.loss import num_predictions, overflow_hint, perplexity
from allocmoe.solver import parse_budget, to_grid, uniform, uniform_mean
from allocmoe.text import Text, check_ids, note_length

# of a perplexity, relative; on text that a model knows no layer's falls that far
_CLEAR_FALL = 0.003

PARTIAL_KIND: Literal["allocmoe.profile-in-progress"] = "allocmoe.profile-in-progress"


def profile(
    model: nn.Module | Engine,
    text: Text,
    *,
    context: ContextName = "paper",
    budget: str | float | None = None,
    token: TokenRule | None = None,
    ks: Sequence[float] | None = None,
    batch_size: int = 4,
    offload: bool = False,
    save_to: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure how sensitive each MoE layer of `model` is to its number of activations.

    model: a transformers model, or an engine that runs one (`VllmEngine`).
    context: what the other layers do meanwhile; `around` needs the `budget` it is around.
    token: a token rule that is on while measuring (alloc-t in batch or sequence scope).
    ks: the grid of k, each layer's k_orig is added; all whole numbers if not given.
    save_to: where the result goes; finished rows are kept beside it in FILE.partial, and
      `resume` goes on from there, or returns the finished profile in FILE if it is this one.
    """
    moe = inspect_model(model) if isinstance(model, nn.Module) else model.moe
    token = token or TokenRule()
    others, layer_ks = check_settings(
        moe.k_orig, context, budget, token, ks, batch_size, save_to, resume
    )
    job = _Job(
        moe=moe,
        dtype=str(model.dtype),
        text=text,
        context=others,
        token=token,
        ks=layer_ks,
        batch_size=batch_size,
        ranks=current_ranks(),
        progress=progress or Progress(),
        partial=None if save_to is None else Path(f"{save_to}.partial"),
    )
    if resume:
        job.load_partial()
        finished = existing_profile(
            save_to,
            moe.info,
            text,
            context=job.context,
            token=token,
            ks=job.ks,
            dtype=job.dtype,
            batch_size=batch_size,
        )
        if finished is not None and not job.rows:
            job.progress.note(f"{save_to} fits and is used again")
            return finished
    check_ids(moe.model, text.ids)
    note_length(moe.model, text, job.progress)
    measurer: Measurer
    if isinstance(model, nn.Module):
        measurer = WalkMeasurer(moe, text.ids, token, batch_size, job.ranks, offload)
        if not measurer.walkable:
            job.progress.note(
                f"{moe.info.family} layers hand on more than a hidden state: "
                "every run has to start at the first layer, which takes longer"
            )
    else:
        measurer = EngineMeasurer(model, text.ids, token)
    result = job.run(measurer)
    if save_to is not None and job.ranks.rank == 0:
        result.save(save_to)
        assert job.partial is not None
        job.partial.unlink(missing_ok=True)
    job.ranks.wait()
    return result


def check_settings(
    k_orig: Sequence[int],
    context: ContextName,
    budget: str | float | None,
    token: TokenRule,
    ks: Sequence[float] | None,
    batch_size: int,
    save_to: str | Path | None,
    resume: bool,
) -> tuple[Context, tuple[tuple[float, ...], ...]]:
    """The context and the grid of a profile; refuses what can be refused without weights."""
    if token.rule not in ("none", "alloc-t") or token.needs_thresholds:
        raise AllocMoEError(
            f"profiling runs with no token rule or with alloc-t in batch or sequence scope, "
            f"not with {token.label}"
        )
    if token.k_base > max(k_orig):
        raise AllocMoEError(
            f"k_base must be at most the model's own k of {max(k_orig)}: {token.k_base}"
        )
    if batch_size < 1:
        raise AllocMoEError(f"batch_size must be 1 or more, not {batch_size}")
    if save_to is not None:
        check_writable(Path(save_to))
        if not resume and Path(f"{save_to}.partial").exists():
            raise AllocMoEError(
                f"{save_to}.partial holds the rows of an unfinished profile: "
                "go on with --resume, or delete it to start anew"
            )
    return make_context(context, k_orig, budget, token), grid(ks, k_orig, token)


def make_context(
    name: ContextName, k_orig: Sequence[int], budget: str | float | None, token: TokenRule
) -> Context:
    full = tuple(float(k) for k in k_orig)
    if name == "around" and budget is None:
        raise AllocMoEError("the context around needs the budget it is around")
    if name != "around" and budget is not None:
        raise AllocMoEError(f"the context {name} takes no budget, only around does")
    if name == "paper":
        return Context(name, full, tuple(1.0 for _ in full))
    if name == "single":
        return Context(name, full, full)
    assert budget is not None
    total = parse_budget(budget, k_orig)
    if token.rule == "none":
        split = tuple(float(k) for k in uniform(k_orig, total))
    else:
        split = uniform_mean(k_orig, total)
    return Context(name, split, split)


def grid(
    ks: Sequence[float] | None, k_orig: Sequence[int], token: TokenRule
) -> tuple[tuple[float, ...], ...]:
    """The values of k to measure in each layer: those given that the layer has, and its k_orig."""
    if ks is None:
        return tuple(tuple(float(k) for k in range(1, own + 1)) for own in k_orig)
    if not ks or not all(1 <= k <= max(k_orig) for k in ks):
        raise AllocMoEError(f"the grid of k must lie in 1..{max(k_orig)}: {list(ks)}")
    if token.rule == "none" and any(k != int(k) for k in ks):
        raise AllocMoEError(f"without a token rule the grid of k must be whole: {list(ks)}")
    values = tuple(
        tuple(sorted({float(k) for k in ks if k < own} | {float(own)})) for own in k_orig
    )
    to_grid(values)  # refuses what no budget could be solved on
    return values


def better_cut(sensitivity: Sensitivity) -> dict[int, float]:
    """Layers in which fewer experts clearly lower the perplexity, and its relative change.

    Alloc-L would cut them, to the cost of text that the model knows better than this one.
    """
    lowest = {layer: min(row) for layer, row in enumerate(sensitivity.cost("relative"))}
    return {layer: change for layer, change in lowest.items() if change < -_CLEAR_FALL}


def existing_profile(
    file: str | Path | None,
    info: ModelInfo,
    text: Text,
    *,
    context: Context,
    token: TokenRule,
    ks: tuple[tuple[float, ...], ...],
    dtype: str,
    batch_size: int,
) -> Sensitivity | None:
    """The finished profile in `file`, if it is the one that would be made now."""
    if file is None or not Path(file).exists():
        return None
    found = Sensitivity.load(file)
    same_model = found.model.fingerprint == info.fingerprint and not found.model.difference(info)
    same_text = found.text is not None and found.text.sha256 == text.info.sha256
    same_run = (found.context, found.token, found.ks) == (context, token, ks)
    same_dtype = found.dtype == dtype.removeprefix("torch.")
    # only there does what a token keeps depend on the others of its batch
    same_batch = token.scope != "batch" or found.batch_size == batch_size
    fits = same_model and same_text and same_run and same_dtype and same_batch
    return found if fits else None


@dataclass(frozen=True)
class _Partial:
    """The rows of an unfinished profile, as kept on disk."""

    kind: Literal["allocmoe.profile-in-progress"]
    settings: dict[str, Any]
    base_perplexity: float
    rows: tuple[tuple[float, ...], ...]
    seconds: float


@dataclass
class _Job:
    moe: MoEModel
    dtype: str
    text: Text
    context: Context
    token: TokenRule
    ks: tuple[tuple[float, ...], ...]
    batch_size: int
    ranks: Ranks
    progress: Progress
    partial: Path | None
    # perplexity of a configuration, as entries of different rows can be the same one
    measured: dict[tuple[float, ...], float] = field(default_factory=dict)
    rows: list[tuple[float, ...]] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, measurer: Measurer) -> Sensitivity:
        began = time.perf_counter()
        earlier = self.seconds
        tokens = self.text.ids.numel()
        self.progress.note(
            f"profiling {self.moe.info.id} in the context {self.context.name}: {len(self.ks)} MoE "
            f"layers, {sum(map(len, self.ks))} entries over {tokens} tokens"
            + (f", {len(self.rows)} rows already done" if self.rows else "")
        )
        walkable = measurer.walkable
        depth = len(self.moe.decoder_layers)
        full = tuple(float(k) for k in self.moe.k_orig)
        with measurer, self.progress.bar("profile", self._work(walkable)) as bar:
            if full not in self.measured:
                self._measure(measurer, full)
            bar.advance(depth, "unmodified model")
            for layer in self.moe.layers[len(self.rows) :]:
                if walkable:
                    measurer.set_budgets(self.context.before)
                    measurer.advance(layer.decoder_index)
                row = []
                for k in self.ks[layer.index]:
                    config = self._config(layer.index, k)
                    # the last run of a row may carry the text to the next row
                    onward = walkable and k == self.ks[layer.index][-1]
                    move_to = self._next_start(layer.index, k) if onward else None
                    row.append(self._measure(measurer, config, move_to))
                    bar.advance(
                        depth - layer.decoder_index, f"row {layer.index + 1}/{len(self.ks)}"
                    )
                self.rows.append(tuple(row))
                self.seconds = earlier + time.perf_counter() - began
                self._save_partial()
        return Sensitivity(
            model=self.moe.info,
            text=self.text.info,
            context=self.context,
            token=self.token,
            ks=self.ks,
            perplexity=tuple(self.rows),
            base_perplexity=self.measured[full],
            seconds=round(self.seconds, 3),
            dtype=self.dtype.removeprefix("torch."),
            batch_size=self.batch_size,
        )

    def _work(self, walkable: bool) -> float:
        """Decoder layers to run over the text, the measure of the progress bar."""
        depth = len(self.moe.decoder_layers)
        left = self.moe.layers[len(self.rows) :]
        return depth + sum(
            len(self.ks[layer.index]) * (depth - (layer.decoder_index if walkable else 0))
            for layer in left
        )

    def _config(self, layer: int, k: float) -> tuple[float, ...]:
        return (*self.context.before[:layer], k, *self.context.after[layer + 1 :])

    def _next_start(self, layer: int, k: float) -> int | None:
        """Where the next row starts, if this layer at k is what the next row has before it."""
        if layer + 1 == len(self.ks) or k != self.context.before[layer]:
            return None
        return self.moe.layers[layer + 1].decoder_index

    def _measure(
        self, measurer: Measurer, config: tuple[float, ...], move_to: int | None = None
    ) -> float:
        if config not in self.measured:
            measurer.set_budgets(config)
            value = perplexity(measurer.nll(move_to), num_predictions(self.text.ids))
            if not math.isfinite(value):
                raise AllocMoEError(self._not_finite(config, value))
            self.measured[config] = value
        return self.measured[config]

    def _not_finite(self, config: tuple[float, ...], value: float) -> str:
        layer = len(self.rows)
        if config == tuple(self.moe.k_orig):
            place = "of the unmodified model"
        else:
            place = f"at MoE layer {layer}, k={config[layer]:g},"
        return f"the perplexity {place} is {value}: {overflow_hint(self.moe.model)}"

    # What must not change between a run and its continuation.
    def _settings(self) -> dict[str, Any]:
        model = replace(self.moe.info, id="", revision=None)
        settings: dict[str, Any] = encode(
            {
                "dtype": self.dtype,
                "model": model,
                "text": replace(self.text.info, source=""),
                "context": self.context,
                "token": self.token,
                "ks": self.ks,
                "batch_size": self.batch_size,
            }
        )
        return settings

    def _save_partial(self) -> None:
        if self.partial is None or self.ranks.rank != 0:
            return
        partial = _Partial(
            kind=PARTIAL_KIND,
            settings=self._settings(),
            base_perplexity=self.measured[tuple(map(float, self.moe.k_orig))],
            rows=tuple(self.rows),
            seconds=self.seconds,
        )
        write_json(self.partial, encode(partial))

    def load_partial(self) -> None:
        """Take over the rows of an unfinished run; nothing to take over is a fresh start."""
        if self.partial is None:
            raise AllocMoEError("resume needs the file that the profile is saved to")
        if not self.partial.exists():
            return
        found = decode(_Partial, read_json(self.partial), str(self.partial))
        for key, value in self._settings().items():
            theirs = found.settings.get(key)
            if theirs != value:
                raise AllocMoEError(
                    f"{self.partial}: cannot resume, {_changed(key, theirs, value)}; "
                    "delete the file to start anew"
                )
        if [len(row) for row in found.rows] != [len(ks) for ks in self.ks[: len(found.rows)]]:
            raise AllocMoEError(f"{self.partial}: its rows are not whole; delete the file")
        self.seconds = found.seconds
        self.rows = list(found.rows)
        self.measured[tuple(map(float, self.moe.k_orig))] = found.base_perplexity
        for layer, row in enumerate(found.rows):
            for k, value in zip(self.ks[layer], row, strict=True):
                self.measured[self._config(layer, k)] = value


def _changed(key: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        inner = next(name for name in new if old.get(name) != new[name])
        return _changed(f"{key}.{inner}", old.get(inner), new[inner])
    change = f" from {old} to {new}"
    return f"{key} has changed{change if len(change) < 80 else ''}"
