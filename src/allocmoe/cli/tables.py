"""Artefacts as tables a person wants to read."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from statistics import fmean

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from allocmoe.artifacts import (
    Analysis,
    Benchmark,
    Evaluation,
    LayerActivity,
    Plan,
    Quality,
    Sensitivity,
    SweepRow,
    TaskEvaluation,
    Timing,
    best_quality,
)
from allocmoe.report.tasks import LEGEND, task_summary, task_title

_COLUMNS = (
    "plan",
    "budget",
    "realised",
    "perplexity",
    "log rise",
    "KL",
    "top-1",
    "experts",
)
# what a long name in the first column folds to at least
_NAME_WIDTH = 16


class NumberTable(Table):
    """Cuts no number: columns that do not fit go on in a block below, beside the first one again.

    Where overflow is "fold", long names in the first column and headers of the others may fold.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needs = [self._need(console, options, column) for column in self.columns]
        room = options.max_width - self._extra_width
        widths = self._calculate_column_widths(console, options.update_width(room))
        if all(width >= need for width, need in zip(widths, needs, strict=True)):
            yield from super().__rich_console__(console, options)
            return
        blocks: list[list[int]] = []
        left = 0
        for index, need in enumerate(needs[1:], start=1):
            # a column takes a line of the box too, and there is one more
            left -= need + 1
            if left < 0:
                blocks.append([0])
                left = options.max_width - (1 + needs[0] + 1 + need + 1)
            blocks[-1].append(index)
        for block in blocks:
            part = copy(self)
            part.title = self.title if block is blocks[0] else None
            # the last block may be too narrow for it
            part.caption = None
            part.columns = []
            left = options.max_width - 1 - sum(needs[index] + 1 for index in block)
            for index in block:
                column = self.columns[index]
                wide = self._measure_column(console, _unbounded(options), column).maximum
                more = max(0, min(left, wide - needs[index]))
                left -= more
                width = needs[index] + more - self._get_padding_width(index)
                part.columns.append(replace(column, width=width))
            yield from Table.__rich_console__(part, console, options)
        if isinstance(self.caption, str):
            yield console.render_str(self.caption, style="table.caption", highlight=False)

    def _need(self, console: Console, options: ConsoleOptions, column: Column) -> int:
        """The width, with its padding, under which something in the column would be cut."""
        fold = column.overflow == "fold"
        kept = replace(column, header="") if fold else column
        span = self._measure_column(console, _unbounded(options), kept)
        need = span.maximum if column.no_wrap else span.minimum
        return min(need, _NAME_WIDTH) if fold and column is self.columns[0] else need


def _unbounded(options: ConsoleOptions) -> ConsoleOptions:
    return options.update(width=1 << 16)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = NumberTable(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table


def quality_table(evaluation: Evaluation, best: str | None = None) -> Table:
    """One row a plan; `best` is marked, or else the best at each budget is."""
    text = evaluation.text
    assert text is not None
    table = NumberTable(
        title_justify="left",
        caption_justify="left",
        title=f"{evaluation.model.id} on {text.source}, "
        f"{text.num_sequences} x {text.sequence_length} tokens",
        caption="log rise: of the log-perplexity over the unmodified model. KL: to it, in nats a "
        "token.\nexperts: distinct experts a layer loads to decode "
        f"{evaluation.sequences_a_step} sequences together.",
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    table.add_column("plan", overflow="fold")
    for name in _COLUMNS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    winners = {best} if best is not None else _winners(evaluation.rows)
    for row in evaluation.rows:
        table.add_row(*_cells(row), style="bold green" if row.name in winners else None)
    return table


def quality_markdown(evaluation: Evaluation) -> str:
    lines = [
        "| " + " | ".join(_COLUMNS) + " |",
        "|---|" + "---:|" * (len(_COLUMNS) - 1),
        *("| " + " | ".join(_cells(row)) + " |" for row in evaluation.rows),
    ]
    return "\n".join(lines) + "\n"


def _cells(row: Quality) -> list[str]:
    distinct = sum(row.distinct_per_step) / len(row.distinct_per_step)
    return [
        row.name,
        f"{row.budget:g}",
        f"{row.realised:.2f}",
        f"{row.perplexity:.3f}",
        f"{row.log_rise:+.4f}",
        "-" if row.kl is None else f"{row.kl:.4f}",
        f"{row.top1_agreement:.1%}",
        f"{distinct:.2f}",
    ]


def _winners(rows: Sequence[Quality]) -> set[str]:
    at: dict[float, list[Quality]] = {}
    for row in rows[1:]:
        at.setdefault(row.budget, []).append(row)
    return {best_quality(own).name for own in at.values()} if len(rows) > 2 else set()


def task_table(evaluation: TaskEvaluation) -> Table:
    table = NumberTable(
        title_justify="left",
        caption_justify="left",
        title=f"{evaluation.model.id}: {task_title(evaluation)}",
        caption=LEGEND,
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    columns, rows = task_summary(evaluation)
    table.add_column("plan", overflow="fold")
    for name in columns[1:3]:
        table.add_column(name, justify="right")
    for name in columns[3:]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def plan_table(plan: Plan) -> Table:
    table = NumberTable(
        title_justify="left",
        caption_justify="left",
        title=f"{plan.method}, {plan.model.id}: {plan.budget_used:g} of {sum(plan.model.k_orig)}",
        caption=f"token rule {plan.token.label}"
        + (f", k_base {plan.token.k_base}" if plan.token.rule == "alloc-t" else "")
        + (
            ""
            if plan.predicted_loss is None
            else f"; predicted loss {plan.predicted_loss:.4f} ({plan.normalisation})"
        ),
    )
    table.add_column("MoE layer", justify="right")
    table.add_column("activations", justify="right", min_width=11)
    table.add_column("of", justify="right")
    table.add_column("")
    if plan.token.thresholds is not None:
        table.add_column("threshold", justify="right")
    for layer, (budget, k) in enumerate(zip(plan.layer_budgets, plan.model.k_orig, strict=True)):
        bar = "█" * round(4 * budget) + "░" * (4 * k - round(4 * budget))
        cells = [str(layer), f"{budget:g}", str(k), bar[::2]]
        if plan.token.thresholds is not None:
            cells.append(f"{plan.token.thresholds[layer]:.4g}")
        table.add_row(*cells)
    return table


def sensitivity_table(sensitivity: Sensitivity) -> Table:
    """log S[l, k] - log S[l, k_orig], as heat."""
    ks = sorted({k for row in sensitivity.ks for k in row})
    cost = sensitivity.cost("log")
    largest = max((max(row) for row in cost), default=0.0) or 1.0
    table = NumberTable(
        title_justify="left",
        caption_justify="left",
        title=f"sensitivity of {sensitivity.model.id} in the context {sensitivity.context.name}",
        caption=f"rise of the log-perplexity over the layer's own k; unmodified perplexity "
        f"{sensitivity.base_perplexity:.4f}, token rule {sensitivity.token.label}, "
        f"{sensitivity.seconds:.1f} s",
    )
    table.add_column("MoE layer", justify="right")
    for k in ks:
        table.add_column(f"k={k:g}", justify="right")
    for layer, row in enumerate(cost):
        values = dict(zip(sensitivity.ks[layer], row, strict=True))
        table.add_row(str(layer), *(_heat(values.get(k), largest) for k in ks))
    return table


def _heat(value: float | None, largest: float) -> Text:
    if value is None:
        return Text()
    share = value / largest
    style = "red" if share > 0.5 else "yellow" if share > 0.2 else "green"
    return Text(f"{value:.4f}", style)


def analysis_table(analysis: Analysis) -> Table:
    table = NumberTable(
        title_justify="left",
        caption_justify="left",
        title=f"{analysis.name} ({analysis.method}, {analysis.token}) on {analysis.model.id}",
        caption="load: of the experts, before and after. kept/entropy: rank correlation over "
        "tokens of the experts kept with the routing entropy.",
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    for name in (
        "MoE layer",
        "budget",
        "realised",
        "load Spearman",
        "entropy drop",
        "JSD",
        "kept/entropy",
    ):
        table.add_column(name, justify="right")
    for number, layer in enumerate(analysis.layers):
        correlation = layer.entropy_correlation
        table.add_row(
            str(number),
            f"{analysis.layer_budgets[number]:g}",
            f"{analysis.realised_per_layer[number]:.3f}",
            f"{layer.spearman:.3f}",
            f"{layer.entropy_before - layer.entropy_after:.4f}",
            f"{layer.js_divergence:.4f}",
            "-" if correlation is None else f"{correlation:+.3f}",
        )
    return table


def sweep_tables(analysis: Analysis) -> list[Table]:
    sweeps = (("k_base", analysis.k_base_sweep), ("calibration text", analysis.text_sweep))
    return [_sweep_table(title, rows) for title, rows in sweeps if rows]


def _sweep_table(title: str, rows: Sequence[SweepRow]) -> Table:
    table = NumberTable(title=f"sweep over {title}", box=box.SIMPLE_HEAD, padding=(0, 0))
    table.add_column(title, overflow="fold")
    for name in ("perplexity", "log rise", "realised"):
        table.add_column(name, justify="right")
    table.add_column("layer budgets")
    for row in rows:
        table.add_row(
            row.value,
            f"{row.perplexity:.3f}",
            f"{row.log_rise:+.4f}",
            f"{row.realised:.2f}",
            " ".join(f"{k:g}" for k in row.layer_budgets),
        )
    return table


def benchmark_tables(benchmark: Benchmark) -> tuple[Table, Table]:
    """How fast every plan is, and where the time of a decode step goes."""
    return _speed_table(benchmark), _decode_table(benchmark)


def _speed_table(benchmark: Benchmark) -> Table:
    protocol, machine = benchmark.protocol, benchmark.machine
    table = NumberTable(
        title_justify="left",
        caption_justify="left",
        title=f"{benchmark.model.id} on {machine.gpu or machine.processor}, {benchmark.dtype}, "
        f"batch {protocol.batch_size}, {protocol.decode_tokens} tokens decoded",
        caption=f"ms: median of {protocol.runs} runs, ± half their range. x: times as fast as the "
        "unmodified model, which took "
        f"{benchmark.prefill_drift:+.1%} (prefill) and {benchmark.decode_drift:+.1%} (decode) the "
        "second time."
        + (
            " The weights are random: a trained model routes less evenly."
            if benchmark.random_weights
            else ""
        ),
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    table.add_column("plan", overflow="fold")
    for length in protocol.prompt_lengths:
        table.add_column(f"prefill {length}", justify="right")
        table.add_column("x", justify="right")
    for name in ("decode step", "x", "tokens/s"):
        table.add_column(name, justify="right")
    for row in benchmark.rows:
        table.add_row(
            row.name,
            *(cell for p in row.prefill for cell in (_spread(p.time), f"{p.speedup:.2f}")),
            _spread(row.decode.step),
            f"{row.decode.speedup:.2f}",
            f"{row.decode.tokens_per_second:.0f}",
        )
    return table


def _spread(timing: Timing) -> str:
    half = (timing.max_ms - timing.min_ms) / 2 / timing.median_ms
    return f"{_ms(timing.median_ms)} ±{half:.1%}"


def _ms(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"


def _decode_table(benchmark: Benchmark) -> Table:
    speed = benchmark.copy_bytes_per_second / 1e9
    table = NumberTable(
        title_justify="left",
        caption_justify="left",
        title="a decode step, in ms",
        caption="experts: the routed experts of all layers alone; rest: all else. realised: "
        "activations a token and layer. distinct: experts that a layer loads. floor: what a step "
        f"must read, at the {speed:.0f} GB/s of a copy.",
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    table.add_column("plan", overflow="fold")
    for name in ("experts", "rest", "realised", "distinct", "floor", "x floor", "experts by"):
        table.add_column(name, justify="right")
    for row in benchmark.rows:
        decode = row.decode
        table.add_row(
            row.name,
            _ms(decode.experts.median_ms),
            _ms(decode.rest_ms),
            f"{fmean(decode.realised_per_layer):.3f}",
            f"{fmean(decode.distinct_per_step):.2f}",
            _ms(decode.floor_ms),
            f"{decode.times_floor:.2f}",
            row.experts,
        )
    return table


def activity_table(activity: Sequence[LayerActivity]) -> Table:
    table = NumberTable(title="what ran")
    for name in ("MoE layer", "tokens", "activations", "a token", "experts/step"):
        table.add_column(name, justify="right")
    for layer, ran in enumerate(activity):
        table.add_row(
            str(layer),
            str(ran.tokens),
            str(ran.activations),
            f"{ran.mean:.3f}",
            f"{ran.distinct_per_step:.2f}",
        )
    return table
