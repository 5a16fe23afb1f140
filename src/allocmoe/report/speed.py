"""Plots of benchmarks: prefill and decode times, and how near the decode comes to its floor."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from allocmoe.artifacts import Benchmark, Speed, Timing
from allocmoe.report.drawing import Plot, Theme, panels, short
from allocmoe.report.gather import Bundle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 2
_FIXED = ("plan", "method", "token rule", "budget", "experts by")
_DECODE = (
    "decode step (ms)",
    "min",
    "max",
    "x",
    "tokens/s",
    "experts (ms)",
    "rest (ms)",
    "realised per token and layer",
    "distinct experts per layer",
    "floor (ms)",
    "x floor",
    "compiled",
    "in CUDA graphs",
)


def speed_plots(bundle: Bundle) -> list[Plot]:
    return [
        _speed(f"speed-{number}", path, benchmark)
        for number, (path, benchmark) in enumerate(bundle.of(Benchmark), start=1)
    ]


def _speed(key: str, path: str, benchmark: Benchmark) -> Plot:
    protocol, rows = benchmark.protocol, benchmark.rows
    num_panels = 1 + len(protocol.prompt_lengths)

    def draw(figure: Figure, theme: Theme) -> None:
        decode, *prefills = panels(figure, num_panels, _COLUMNS)
        _draw_decode(decode, theme, rows)
        for index, ax in enumerate(prefills):
            timings = [row.prefill[index].time for row in rows]
            medians = [timing.median_ms for timing in timings]
            ax.barh(range(len(rows)), medians, 0.6, color=theme.colours["alloc-t"], alpha=0.6)
            _mark(ax, theme, timings, [row.prefill[index].speedup for row in rows])
            ax.set_title(f"prefill of {protocol.batch_size} x {protocol.prompt_lengths[index]}")
        for index, ax in enumerate((decode, *prefills)):
            names = [short(row.name, 28) if index % _COLUMNS == 0 else "" for row in rows]
            ax.set_yticks(range(len(rows)), names)
            ax.set_ylim(len(rows) - 0.5, -0.5)
            ax.grid(False, axis="y")
            ax.set_xlabel("ms")
        handles, labels = decode.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3)

    lengths = protocol.prompt_lengths
    prefill_columns = [c for n in lengths for c in (f"prefill {n} (ms)", "min", "max", "x")]
    return Plot(
        key=key,
        section="speed",
        title=f"Prefill and decode times ({path})",
        caption=_caption(benchmark),
        columns=(*_FIXED, *prefill_columns, *_DECODE),
        rows=tuple(_cells(row) for row in rows),
        size=(9.0, 0.9 + (0.8 + 0.34 * len(rows)) * -(-num_panels // _COLUMNS)),
        draw=draw,
    )


def _draw_decode(ax: Axes, theme: Theme, rows: tuple[Speed, ...]) -> None:
    places = range(len(rows))
    experts = [row.decode.experts.median_ms for row in rows]
    # on a noisy machine the experts alone may take longer than the step that they are part of
    rest = [max(0.0, row.decode.rest_ms) for row in rows]
    ax.barh(places, experts, 0.6, color=theme.colours["alloc-l"], label="routed experts")
    ax.barh(places, rest, 0.6, left=experts, color=theme.muted, alpha=0.5, label="rest of the step")
    ax.plot(
        [row.decode.floor_ms for row in rows],
        places,
        linestyle="none",
        marker="|",
        markersize=15,
        markeredgewidth=2.5,
        color=theme.colours["alloc-moe"],
        label="floor: what must be read",
        zorder=4,
    )
    _mark(ax, theme, [row.decode.step for row in rows], [row.decode.speedup for row in rows])
    ax.set_title("decode, a step")


def _mark(ax: Axes, theme: Theme, timings: list[Timing], speedups: list[float]) -> None:
    """The spread of the runs, and how many times as fast as the unmodified model."""
    for place, (timing, speedup) in enumerate(zip(timings, speedups, strict=True)):
        ax.plot([timing.min_ms, timing.max_ms], [place] * 2, "|-", color=theme.ink, linewidth=1.2)
        ax.annotate(
            f"{timing.median_ms:.{0 if timing.median_ms >= 100 else 2}f} ({speedup:.2f}x)",
            (timing.max_ms, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            size=9,
        )
    ax.set_xlim(0, 1.4 * max(timing.max_ms for timing in timings))


def _cells(row: Speed) -> tuple[str, ...]:
    decode = row.decode
    return (
        row.name,
        row.method,
        row.token,
        f"{row.budget:g}",
        row.experts,
        *(cell for prefill in row.prefill for cell in _times(prefill.time, prefill.speedup)),
        *_times(decode.step, decode.speedup),
        f"{decode.tokens_per_second:.0f}",
        f"{decode.experts.median_ms:.4g}",
        f"{decode.rest_ms:.4g}",
        f"{fmean(decode.realised_per_layer):.3f}",
        f"{fmean(decode.distinct_per_step):.2f}",
        f"{decode.floor_ms:.4g}",
        f"{decode.times_floor:.2f}",
        "yes" if decode.compiled else "no",
        "yes" if decode.captured else "no",
    )


def _times(timing: Timing, speedup: float) -> tuple[str, ...]:
    return (
        *(f"{ms:.4g}" for ms in (timing.median_ms, timing.min_ms, timing.max_ms)),
        f"{speedup:.2f}",
    )


def _caption(benchmark: Benchmark) -> str:
    protocol, machine = benchmark.protocol, benchmark.machine
    base = benchmark.rows[0].decode
    lines = [
        f"{machine.gpu or machine.processor}, {benchmark.dtype}, {protocol.batch_size} sequences, "
        f"{protocol.decode_tokens} tokens decoded after {protocol.prompt_lengths[0]}; medians of "
        f"{protocol.runs} runs, whiskers from the fastest to the slowest."
    ]
    plans = [row for row in benchmark.rows if row.method != benchmark.rows[0].method]
    if plans:
        best = max(plans, key=lambda row: row.decode.speedup)
        lines.append(
            f"{best.name} decodes fastest, {best.decode.speedup:.2f} times as fast as the "
            f"unmodified model, of whose step the routed experts take "
            f"{base.experts.median_ms / base.step.median_ms:.0%}."
        )
    lines.append(
        f"The floor is what a step must read at {benchmark.copy_bytes_per_second / 1e9:.0f} GB/s, "
        "the speed of a copy. Measured again at the end, the unmodified model took "
        f"{benchmark.prefill_drift:+z.1%} (prefill) and {benchmark.decode_drift:+z.1%} (decode)."
    )
    if benchmark.random_weights:
        lines.append("The weights are random: a trained model routes less evenly.")
    if benchmark.command is not None:
        lines.append(f"Made by: {benchmark.command}")
    return " ".join(lines)
