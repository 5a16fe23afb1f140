"""Layer allocations at a budget: numpy and the standard library only, pure functions.

solve_frontier   the exact optimum for every budget at once
uniform          the same K in all layers (uniform_mean: its real-valued version)
ascending        a ramp that grows with depth (descending: its mirror image)
evolve           LExI's evolutionary search
parse_budget     "78", "50%" or "3.5/layer" as a total
to_grid          values of k as whole numbers of the coarsest unit they share
"""

from __future__ import annotations

from allocmoe.solver.budget import parse_budget
from allocmoe.solver.frontier import Allocation, Frontier, solve_frontier, to_grid
from allocmoe.solver.lexi import evolve
from allocmoe.solver.ramps import ascending, descending
from allocmoe.solver.uniform import uniform, uniform_mean

__all__ = [
    "Allocation",
    "Frontier",
    "ascending",
    "descending",
    "evolve",
    "parse_budget",
    "solve_frontier",
    "to_grid",
    "uniform",
    "uniform_mean",
]
