"""From a folder of artefacts to the page and the plot files."""

from __future__ import annotations

from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from allocmoe.codec import check_writable, write_bytes, write_text
from allocmoe.errors import AllocMoEError
from allocmoe.progress import Progress
from allocmoe.report.analysis import analysis_plots
from allocmoe.report.drawing import (
    DARK,
    LIGHT,
    Plot,
    file_mark,
    inline_svg,
    load_matplotlib,
    render,
)
from allocmoe.report.gather import Bundle, gather
from allocmoe.report.layers import budget_plots, sensitivity_plots
from allocmoe.report.page import make_page
from allocmoe.report.quality import quality_plots
from allocmoe.report.speed import speed_plots


@dataclass(frozen=True)
class Written:
    """What a report was made from, and the files it became."""

    page: Path
    plots: tuple[Path, ...]
    artifacts: tuple[str, ...]


def write_report(
    directory: str | Path, output: str | Path | None = None, *, progress: Progress | None = None
) -> Written:
    """One HTML page of all artefacts in `directory`; the plots go into `directory`/plots too."""
    folder = Path(directory)
    page = folder / "report.html" if output is None else Path(output)
    if page.suffix == ".json":
        raise AllocMoEError(f"{page}: the report is HTML; name the output .html")
    bundle = gather(folder)
    load_matplotlib()
    check_writable(page)
    plots = make_plots(bundle)
    drawings: dict[str, str] = {}
    files: dict[Path, bytes] = {}
    with (progress or Progress()).bar("report", len(plots)) as bar:
        for plot in plots:
            light, dark = render(plot, LIGHT, "svg"), render(plot, DARK, "svg")
            drawings[plot.key] = f"{inline_svg(plot, LIGHT, light)}\n{inline_svg(plot, DARK, dark)}"
            files[folder / "plots" / f"{plot.key}.svg"] = light
            files[folder / "plots" / f"{plot.key}.png"] = render(plot, LIGHT, "png")
            bar.advance(1, plot.key)
    for path, data in files.items():
        write_bytes(path, data)
    _remove_stale(folder / "plots", files)
    write_text(page, make_page(bundle, plots, drawings))
    return Written(page, tuple(files), tuple(bundle.artifacts))


def _remove_stale(folder: Path, files: Container[Path]) -> None:
    """Plots of an earlier report whose artefacts are gone; copies under other names are kept."""
    for path in folder.glob("*.*"):
        if path in files or path.suffix not in (".svg", ".png") or not path.is_file():
            continue
        # a file that cannot be read is not ours, and no reason to give no report
        with suppress(OSError):
            if file_mark(path.stem).encode() in path.read_bytes():
                path.unlink()


def make_plots(bundle: Bundle) -> list[Plot]:
    return [
        *quality_plots(bundle),
        *speed_plots(bundle),
        *sensitivity_plots(bundle),
        *budget_plots(bundle),
        *analysis_plots(bundle),
    ]
