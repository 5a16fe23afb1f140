"""What every plot shares: themes, colours, and the way from a figure to SVG and PNG."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allocmoe.errors import AllocMoEError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    name: str
    paper: str
    ink: str
    muted: str
    grid: str
    heat: str  # a colour map
    colours: dict[str, str]
    others: tuple[str, ...]


# Okabe and Ito's palette, the light tones darkened on white and the dark ones lightened on black
LIGHT = Theme(
    name="light",
    paper="#ffffff",
    ink="#1d232b",
    muted="#5c6672",
    grid="#e3e7ec",
    heat="Blues",
    colours={
        "alloc-moe": "#d55e00",
        "alloc-l": "#0072b2",
        "alloc-t": "#009e73",
        "uniform": "#5c6672",
        "ascending": "#b87f00",
        "descending": "#cc79a7",
        "lexi": "#3a9bd6",
        "naee": "#8a7d00",
        "dynamic-moe": "#6a3d9a",
    },
    others=("#000000", "#7f4f24", "#2f6f4f"),
)
DARK = Theme(
    name="dark",
    paper="#171b21",
    ink="#e6e9ee",
    muted="#a0a9b5",
    grid="#2c333d",
    heat="cividis",
    colours={
        "alloc-moe": "#ff8b3d",
        "alloc-l": "#4aa8e8",
        "alloc-t": "#2cc79b",
        "uniform": "#a0a9b5",
        "ascending": "#e69f00",
        "descending": "#e39ac4",
        "lexi": "#9fd6f5",
        "naee": "#f0e442",
        "dynamic-moe": "#b79cf0",
    },
    others=("#ffffff", "#d9a77a", "#8fd0ae"),
)
THEMES = (LIGHT, DARK)
MARKERS = {
    "alloc-moe": "o",
    "alloc-l": "s",
    "alloc-t": "^",
    "uniform": "D",
    "ascending": "<",
    "descending": ">",
    "lexi": "v",
    "naee": "P",
    "dynamic-moe": "X",
}
METHOD_ORDER = tuple(MARKERS)
OTHER_MARKERS = ("h", "p", "*")


@dataclass(frozen=True)
class Plot:
    """A figure that can be drawn in a theme, its caption, and its numbers as a table."""

    key: str
    section: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    size: tuple[float, float]  # inches
    draw: Callable[[Figure, Theme], None]


def load_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise AllocMoEError("the report needs matplotlib: pip install 'allocmoe[report]'") from None
    return matplotlib


def render(plot: Plot, theme: Theme, kind: str) -> bytes:
    """The plot as "svg" or "png"; the same bytes for the same plot."""
    matplotlib = load_matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font lacks is drawn as a box
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_settings(plot, theme))
        figure = Figure(figsize=plot.size, layout="constrained")
        plot.draw(figure, theme)
        stream = io.BytesIO()
        # neither the time nor the library's version goes into the file
        ours = file_mark(plot.key)
        metadata = {"Date": None, "Creator": ours} if kind == "svg" else {"Software": ours}
        figure.savefig(stream, format=kind, dpi=160, metadata=metadata)
    return stream.getvalue()


def file_mark(key: str) -> str:
    """Stands in the file of a plot, so that a later report knows it as written by an earlier."""
    return f"allocmoe plot {key}."


def _settings(plot: Plot, theme: Theme) -> dict[str, Any]:
    return {
        "svg.hashsalt": f"{plot.key}-{theme.name}",
        # letters as paths look the same on a machine without the font
        "svg.fonttype": "path",
        # a name may hold a dollar sign
        "text.parse_math": False,
        "axes.unicode_minus": True,
        "font.size": 10.5,
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "axes.edgecolor": theme.muted,
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
        "text.color": theme.ink,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
    }


def inline_svg(plot: Plot, theme: Theme, drawing: bytes) -> str:
    """The SVG as an element of a page: it scales, and its ids are its own."""
    prefix = f"{plot.key}-{theme.name}"
    svg = drawing.decode("utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # a style inside an inlined SVG would hold for the whole page; the page has it once
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(?<![\w-])id="', f'id="{prefix}-', svg)
    svg = svg.replace("url(#", f"url(#{prefix}-").replace('href="#', f'href="#{prefix}-')
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(?:width|height)="[^"]*"', "", opening)
    opening += f' class="{theme.name}" aria-hidden="true" focusable="false"'
    return re.sub(r"\n\s*", "\n", f"{opening}>{rest}").strip()


def method_rank(method: str) -> tuple[int, str]:
    known = method in METHOD_ORDER
    return (METHOD_ORDER.index(method) if known else len(METHOD_ORDER), method)


def colour(theme: Theme, method: str, index: int = 0) -> str:
    return theme.colours.get(method) or theme.others[index % len(theme.others)]


def marker(method: str, index: int = 0) -> str:
    return MARKERS.get(method) or OTHER_MARKERS[index % len(OTHER_MARKERS)]


def short(name: str, most: int = 32) -> str:
    """At most `most` characters; the middle goes, as paths often differ in their end only."""
    name = " ".join(name.split())
    if len(name) <= most:
        return name
    head = (most - 1) // 3
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"


def panels(figure: Figure, count: int, columns: int) -> list[Axes]:
    """Small multiples in reading order."""
    columns = min(columns, count)
    rows = -(-count // columns)
    axes = figure.subplots(rows, columns, squeeze=False)
    flat = [ax for row in axes for ax in row]
    for ax in flat[count:]:
        ax.set_visible(False)
    return flat[:count]


def panel_size(count: int, columns: int, height: float) -> tuple[float, float]:
    return 9.0, 0.7 + height * -(-count // columns)


def plain_log_axis(axis: Any, values: Sequence[float]) -> None:
    """Ticks at 1, 2 and 5 of each decade, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    wide = max(values) / min(values) > 300
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
