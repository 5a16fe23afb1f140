"""The HTML page around the plots. Whatever comes out of a file is escaped here."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape

from allocmoe.artifacts import ModelInfo, TaskEvaluation
from allocmoe.report.drawing import Plot
from allocmoe.report.gather import Bundle, Measured, best_within_budget, text_label
from allocmoe.report.quality import UNMODIFIED, by_budget
from allocmoe.report.style import CSS, SCRIPT
from allocmoe.report.tasks import (
    DETAIL_COLUMNS,
    LEGEND,
    task_details,
    task_summary,
    task_title,
)

HEADINGS = {
    "quality": "Quality against budget",
    "tasks": "Tasks",
    "speed": "Speed",
    "sensitivity": "Sensitivity of the layers",
    "layer budgets": "Layer budgets",
    "expert load": "Expert load",
    "tokens and entropy": "Tokens and entropy",
    "spending": "Realised activations",
    "sweeps": "Sweeps",
    "results": "All results",
    "provenance": "Provenance",
}
_RESULT_COLUMNS = (
    "plan",
    "method",
    "token rule",
    "budget",
    "realised",
    "perplexity",
    "log rise",
    "KL (nats)",
    "top-1",
    "experts",
    "file",
)


def make_page(bundle: Bundle, plots: Sequence[Plot], drawings: dict[str, str]) -> str:
    """`drawings` has the SVG elements of each plot, by its key."""
    body: dict[str, list[str]] = {}
    for plot in plots:
        body.setdefault(plot.section, []).append(_figure(plot, drawings[plot.key]))
    results = [
        _results(f"results-{number}", text_label(text), rows)
        for number, (text, rows) in enumerate(bundle.measured(), start=1)
    ]
    if results:
        body["results"] = results
    tasks = [
        _tasks(f"tasks-{number}", path, evaluation)
        for number, (path, evaluation) in enumerate(bundle.of(TaskEvaluation), start=1)
    ]
    if tasks:
        body["tasks"] = tasks
    body["provenance"] = [_provenance(bundle)]
    sections = [name for name in HEADINGS if name in body]
    links = "".join(f'<li><a href="#{_slug(n)}">{HEADINGS[n]}</a></li>' for n in sections)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # nothing is loaded from anywhere, and only our own script runs
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(bundle.model.id)}: allocmoe report</title>",
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>",
        _header(bundle),
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
    ]
    for name in sections:
        slug = _slug(name)
        parts.append(f'<section aria-labelledby="{slug}">\n<h2 id="{slug}">{HEADINGS[name]}</h2>')
        parts += [*body[name], "</section>"]
    parts.append(f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n")
    return "\n".join(parts)


def _slug(name: str) -> str:
    return "section-" + name.replace(" ", "-")


def _header(bundle: Bundle) -> str:
    model = bundle.model
    facts = [
        ("MoE layers", str(len(model.k_orig)), ""),
        ("experts per layer", _range(model.num_experts), ""),
        ("k_orig", _range(model.k_orig), "experts per token and layer"),
        ("full budget", str(bundle.full_budget), "activations per token"),
    ]
    headlines = []
    for number, (text, rows) in enumerate(bundle.measured()):
        base = [r.quality.perplexity for r in rows if r.quality.method == UNMODIFIED]
        if base and number == 0:
            facts.append(("unmodified perplexity", f"{base[0]:.3f}", text_label(text)))
        if number == 0:
            headlines = _headlines(rows, bundle.full_budget)
    return (
        f'<header>\n<h1>{escape(model.id)}</h1>\n<p class="lead">allocmoe report, '
        f"family {escape(model.family)}{_weights(model)}</p>\n"
        f'<dl class="facts">{_facts(facts)}</dl>\n'
        + (f'<dl class="facts wide">{_facts(headlines)}</dl>\n' if headlines else "")
        + "</header>"
    )


def _headlines(rows: Sequence[Measured], full: int) -> list[tuple[str, str, str]]:
    found = []
    for budget, at in by_budget(rows).items():
        best = best_within_budget(at)
        if best is None:
            continue
        q = best.quality
        detail = f"log-perplexity {q.log_rise:+z.3f}, top-1 {q.top1_agreement:.1%}"
        uniform = [r.quality.log_rise for r in at if r.quality.method == "uniform"]
        if uniform and q.method != "uniform":
            detail += f"; uniform {min(uniform):+z.3f}"
        found.append((f"best at {budget:g} of {full} ({budget / full:.0%})", q.name, detail))
    return found


def _facts(facts: Iterable[tuple[str, str, str]]) -> str:
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}"
        + (f"<small>{escape(detail)}</small>" if detail else "")
        + "</dd></div>"
        for name, value, detail in facts
    )


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _weights(model: ModelInfo) -> str:
    return "" if model.fingerprint is None else f", weights {escape(model.fingerprint)}"


def _figure(plot: Plot, drawing: str) -> str:
    label = escape(f"{plot.title}. {plot.caption}")
    return (
        f'<div class="card" id="{plot.key}">\n<h3>{escape(plot.title)}</h3>\n'
        f'<figure role="img" aria-label="{label}" tabindex="0">\n{drawing}\n</figure>\n'
        f'<p class="caption">{escape(plot.caption)}</p>\n'
        f"<details><summary>The numbers</summary>\n"
        f"{_table(plot.columns, plot.rows, plot.title)}</details>\n</div>"
    )


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    label: str,
    *,
    identity: str | None = None,
    best: Sequence[int] = (),
) -> str:
    numeric = [all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    long = [any(len(row[i]) > 60 for row in rows) for i in range(len(columns))]
    kinds = [
        ' class="number"' if number else ' class="long"' if wide else ""
        for number, wide in zip(numeric, long, strict=True)
    ]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>'
        for name, kind in zip(columns, kinds, strict=True)
    )
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(
            f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)
        )
        opening = '<tr class="best">' if index in best else "<tr>"
        lines.append(f"{opening}{cells}</tr>")
    named = f' id="{identity}"' if identity else ""
    return (
        f'<div class="scroll" role="region" aria-label="{escape(label)}: table" tabindex="0">'
        f"<table{named}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(lines)
        + "\n</tbody></table></div>\n"
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell.removesuffix("%") or 0)
    except ValueError:
        return False
    return True


def _results(identity: str, where: str, rows: Sequence[Measured]) -> str:
    winners = {id(best_within_budget(at)) for at in by_budget(rows).values() if len(at) > 1}
    table = _table(
        _RESULT_COLUMNS,
        [_result(row) for row in rows],
        f"Results on {where}",
        identity=identity,
        best=[index for index, row in enumerate(rows) if id(row) in winners],
    )
    return (
        f'<div class="card table">\n<h3>Results on {escape(where)}</h3>\n'
        '<p class="note">log rise: of the log-perplexity over the unmodified model, in nats per '
        "token. KL: from the unmodified model. experts: distinct experts that a layer loads "
        "for one decode step. Marked: the best at each budget among the plans that keep to it.</p>"
        f"\n{_copy_button(identity)}\n{table}</div>"
    )


def _result(row: Measured) -> tuple[str, ...]:
    q = row.quality
    distinct = sum(q.distinct_per_step) / max(len(q.distinct_per_step), 1)
    return (
        q.name,
        q.method,
        q.token,
        f"{q.budget:g}",
        f"{q.realised:.2f}",
        f"{q.perplexity:.3f}",
        f"{q.log_rise:+z.4f}",
        "-" if q.kl is None else f"{q.kl:.4f}",
        f"{q.top1_agreement:.1%}",
        f"{distinct:.2f}",
        row.file,
    )


def _tasks(identity: str, path: str, evaluation: TaskEvaluation) -> str:
    title = f"{task_title(evaluation)} ({path})"
    details = _table(DETAIL_COLUMNS, task_details(evaluation), f"{title}, every metric")
    return (
        f'<div class="card table">\n<h3>{escape(title)}</h3>\n'
        f'<p class="note">{escape(LEGEND)}</p>\n'
        f"{_copy_button(identity)}\n{_table(*task_summary(evaluation), title, identity=identity)}"
        f"<details><summary>Every metric</summary>\n{details}</details>\n</div>"
    )


def _copy_button(identity: str) -> str:
    return (
        f'<p><button type="button" data-copy="{identity}" hidden>Copy the table</button> '
        '<span class="note" role="status"></span></p>'
    )


def _provenance(bundle: Bundle) -> str:
    columns = ("file", "kind", "made", "text", "sha256", "model", "weights")
    rows = [
        (
            path,
            a.KIND.removeprefix("allocmoe."),
            a.created,
            "none" if a.text is None else text_label(a.text),
            "none" if a.text is None else a.text.sha256[:12],
            a.model.id + (f" @ {a.model.revision}" if a.model.revision else ""),
            a.model.fingerprint or "not read",
        )
        for path, a in bundle.artifacts.items()
    ]
    made_with: dict[str, list[str]] = {}
    for path, artifact in bundle.artifacts.items():
        versions = ", ".join(f"{name} {version}" for name, version in artifact.versions.items())
        made_with.setdefault(versions, []).append(path)
    lines = [
        f"<li>{escape(versions)}"
        + ("" if len(made_with) == 1 else f" <small>({escape(', '.join(paths))})</small>")
        + "</li>"
        for versions, paths in made_with.items()
    ]
    return (
        f'<div class="card table">\n<h3>Files</h3>\n{_table(columns, rows, "Files")}</div>\n'
        f'<div class="card">\n<h3>Made with</h3>\n<ul>{"".join(lines)}</ul>\n</div>'
    )
