"""Artefacts as tables a person wants to read."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich import box
from rich.table import Table

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


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table


def quality_table(evaluation: Evaluation, best: str | None = None) -> Table:
    """One row a plan; `best` is marked, or else the lowest perplexity at each budget is."""
    text = evaluation.text
    assert text is not None
    table = Table(
        title_justify="left",
        caption_justify="left",
        title=f"{evaluation.model.id} on {text.source}, "
        f"{text.num_sequences} x {text.sequence_length} tokens",
        caption="log rise: of the log-perplexity over the unmodified model. KL: to it, in nats a "
        "token.\nexperts: distinct experts a layer loads to decode "
        f"{evaluation.batch_size} sequences together.",
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "plan" else "right", no_wrap=True)
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
    best: dict[float, Quality] = {}
    for row in rows[1:]:
        if row.budget not in best or row.perplexity < best[row.budget].perplexity:
            best[row.budget] = row
    return {row.name for row in best.values()} if len(rows) > 2 else set()


def task_table(evaluation: TaskEvaluation) -> Table:
    table = Table(
        title_justify="left",
        caption_justify="left",
        title=f"{evaluation.model.id}: {task_title(evaluation)}",
        caption=LEGEND,
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    columns, rows = task_summary(evaluation)
    for name in columns:
        table.add_column(name, justify="left" if name == "plan" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def plan_table(plan: Plan) -> Table:
    table = Table(
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
    table = Table(
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


def _heat(value: float | None, largest: float) -> str:
    if value is None:
        return ""
    share = value / largest
    style = "red" if share > 0.5 else "yellow" if share > 0.2 else "green"
    return f"[{style}]{value:.4f}[/]"


def analysis_table(analysis: Analysis) -> Table:
    table = Table(
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


def sweep_table(title: str, rows: Sequence[SweepRow]) -> Table:
    table = Table(title=f"sweep over {title}", box=box.SIMPLE_HEAD, padding=(0, 0))
    table.add_column(title)
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
    table = Table(
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
    table.add_column("plan", no_wrap=True)
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
    table = Table(
        title_justify="left",
        caption_justify="left",
        title="a decode step, in ms",
        caption="experts: the routed experts of all layers alone; rest: all else. realised: "
        "activations a token and layer. distinct: experts that a layer loads. floor: what a step "
        f"must read, at the {speed:.0f} GB/s of a copy.",
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
    )
    table.add_column("plan", no_wrap=True)
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
    table = Table(title="what ran")
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
