"""The paper's figures with our numbers, drawn from whatever is finished of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from allocmoe.experiment.figures.methods import comparisons
from allocmoe.experiment.figures.routing import expert_load, layers_and_tokens, load_balance
from allocmoe.experiment.figures.speed import speedup, trade_off
from allocmoe.experiment.figures.sweeps import calibration, contexts, k_base
from allocmoe.experiment.results import Results
from allocmoe.report.drawing import Plot


def make_figures(results: Results) -> list[Plot]:
    """In the paper's order as far as it goes. A figure without any number is left out."""
    makers: tuple[Callable[[Results], Iterator[Plot]], ...] = (
        trade_off,
        comparisons,
        speedup,
        expert_load,
        load_balance,
        layers_and_tokens,
        k_base,
        calibration,
        contexts,
    )
    return [plot for maker in makers for plot in maker(results)]
