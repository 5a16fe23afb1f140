"""What stands in the drawings, and whether it can be read."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_report import analysis, evaluation, fill, plan, quality, sensitivity

from allocmoe.artifacts import Artifact, TokenRule
from allocmoe.report import write_report
from allocmoe.report.drawing import LIGHT, THEMES, Plot, Theme, short
from allocmoe.report.gather import Bundle
from allocmoe.report.write import make_plots

pytest.importorskip("matplotlib", reason="the report needs matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_of(key: str, *artifacts: Artifact) -> Plot:
    files = {f"{number:02d}.json": artifact for number, artifact in enumerate(artifacts)}
    (plot,) = (plot for plot in make_plots(Bundle(files)) if plot.key == key)
    return plot


def drawn(plot: Plot, theme: Theme = LIGHT) -> Any:
    figure = Figure(figsize=plot.size, layout="constrained")
    FigureCanvasAgg(figure)
    plot.draw(figure, theme)
    figure.canvas.draw()
    return figure


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_token_rules_of_a_method_can_be_told_apart(theme: Theme) -> None:
    rows = [
        replace(quality(method, method, budget, 0.1), token=f"alloc-t/{scope}")
        for method in ("alloc-moe", "alloc-t")
        for scope in ("batch", "sequence", "threshold")
        for budget in (6, 9)
    ]
    figure = drawn(plot_of("quality-1", replace(evaluation(), rows=tuple(rows))), theme)
    lines = [line for line in figure.axes[0].lines if "(" in str(line.get_label())]
    assert len(lines) == 6
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 6
    # private, as the public name of any dashes is "--"
    assert len({(line.get_color(), str(line._unscaled_dash_pattern)) for line in lines}) == 6


def test_the_caption_names_the_k_of_its_number() -> None:
    perplexity = ((20.0, 40.0, 10.0), (12.0, 10.0), (11.0, 9.9, 10.0))
    plot = plot_of("sensitivity-1", replace(sensitivity(), perplexity=perplexity))
    assert "layer 0 suffers most from fewer experts (+1.386 at k=2)" in plot.caption
    assert "layer 2 least (+0.095 at k=1)" in plot.caption


def test_no_minus_before_a_zero() -> None:
    perplexity = ((40.0, 20.0, 10.0), (12.0, 10.0), (11.0, 9.9999999, 10.0))
    plot = plot_of("sensitivity-1", replace(sensitivity(), perplexity=perplexity))
    texts = [text.get_text() for text in drawn(plot).axes[0].texts]
    assert texts.count("0.000") == 4
    assert plot.rows[2] == ("2", "+0.0953", "+0.0000", "+0.0000")


def test_many_plans_at_a_budget_fit_and_can_be_told_apart() -> None:
    splits = [s for s in itertools.product((1.0, 1.5, 2.0, 2.5, 3.0), repeat=3) if sum(s) == 6]
    rule = TokenRule("alloc-t", "batch")  # takes budgets that are not whole
    many = [replace(plan(), layer_budgets=s, token=rule) for s in splits if len({*s}) > 1]
    plot = plot_of("layer-budgets", *many, plan(method="uniform"))
    assert f"{len(many) + 1 - 8} of {len(many) + 1} different plans are not drawn" in plot.caption
    assert len(plot.rows) == len(many) + 1
    figure = drawn(plot)
    (ax,) = figure.axes
    labels = [str(bars.get_label()) for bars in ax.containers]
    assert len(labels) == 8
    assert "uniform" in labels
    looks = {(b[0].get_facecolor(), b[0].get_hatch()) for b in ax.containers}
    assert len(looks) == 8
    for box in (ax.get_legend().get_window_extent(), ax.xaxis.label.get_window_extent()):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1


def test_plans_that_are_the_same_by_layer_are_counted_in_the_legend() -> None:
    figure = drawn(plot_of("layer-budgets", *[plan()] * 5))
    (text,) = figure.axes[0].get_legend().get_texts()
    assert text.get_text() == "alloc-moe (00.json) and 4 more"


def test_a_name_is_cut_in_its_middle() -> None:
    assert short("a  name") == "a name"
    assert short("x" * 32) == "x" * 32
    name = "alloc-moe (a/very/long/folder/of/plans/number-07.json)"
    assert short(name) == "alloc-moe …plans/number-07.json)"
    assert len(short(name, 20)) == 20


def test_the_load_of_a_single_layer() -> None:
    layer = replace(analysis().layers[0], load_before=(0.25,) * 4, load_after=(1.0, 0.0, 0.0, 0.0))
    figure = drawn(plot_of("load-1", replace(analysis(), layers=(layer,))))
    label, legend = figure._supylabel, figure.legends[0]
    assert not label.get_window_extent().overlaps(legend.get_window_extent())
    assert label.get_window_extent().x0 >= 0
    low, high = figure.axes[0].get_xlim()
    ranks = [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high]
    assert ranks == [1, 2, 3, 4]


def test_plots_of_an_earlier_report_go_and_other_files_stay(tmp_path: Path) -> None:
    plots = tmp_path / "plots"
    write_report(fill(tmp_path))
    (plots / "load-9.png").write_bytes(b"\x89PNG of somebody else")
    (plots / "notes.txt").write_text("allocmoe plot notes.")
    (plots / "folder.svg").mkdir()
    shutil.copy(plots / "quality-1.svg", plots / "mine.svg")
    shutil.copy(plots / "quality-1.png", plots / "mine.png")
    for path in tmp_path.glob("*.json"):
        path.unlink()
    write_report(tmp_path)
    assert {path.name for path in plots.iterdir()} == {
        *("layer-budgets.png", "layer-budgets.svg"),
        *("load-9.png", "notes.txt", "folder.svg", "mine.svg", "mine.png"),
    }
