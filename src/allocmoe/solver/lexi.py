"""LExI's evolutionary search (arXiv 2509.02753) over integer allocations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from allocmoe.errors import AllocMoEError
from allocmoe.solver.budget import check_budget
from allocmoe.solver.frontier import check_costs


def evolve(
    cost: Sequence[Sequence[float]],
    k_orig: Sequence[int],
    budget: int,
    *,
    population: int = 100,
    generations: int = 200,
    tournament: int = 3,
    mutation_rate: float = 0.1,
    seed: int = 0,
) -> tuple[tuple[int, ...], float]:
    """min over K of sum_l cost[l][K_l - 1]  subject to  sum_l K_l = budget, 1 <= K_l <= k_orig[l].

    cost[l][k-1]: the cost of layer l at k experts. Returns the best allocation K found, and its
    cost. Each generation: parents by tournament, uniform crossover, each layer moved by +-1 with
    probability mutation_rate, projection back to the budget; the best so far always survives.

    A heuristic, kept as the baseline it is: the sum is separable, so `solve_frontier` gives its
    exact optimum.
    """
    check_budget(budget, k_orig)
    check_costs(cost, [range(1, k + 1) for k in k_orig])
    if population < 2 or generations < 0 or tournament < 1 or not 0 <= mutation_rate <= 1:
        raise AllocMoEError(
            "evolve needs population >= 2, generations >= 0, tournament >= 1 and mutation_rate "
            f"in 0..1: {population}, {generations}, {tournament}, {mutation_rate}"
        )
    rng = np.random.default_rng(seed)
    k_max = np.asarray(k_orig, dtype=np.int64)
    layers = np.arange(len(k_orig))
    table = np.zeros((len(k_orig), k_max.max()))
    for layer, row in enumerate(cost):
        table[layer, : len(row)] = row

    # P: population, L: layers.
    genes_PL = rng.integers(1, k_max + 1, size=(population, len(k_orig)))
    genes_PL = _project(genes_PL, k_max, budget, rng)
    fitness_P = table[layers, genes_PL - 1].sum(axis=1)
    for _ in range(generations):
        elite = genes_PL[fitness_P.argmin()].copy()
        mothers_PL = genes_PL[_tournament_winners(fitness_P, tournament, rng)]
        fathers_PL = genes_PL[_tournament_winners(fitness_P, tournament, rng)]
        genes_PL = np.where(rng.random(genes_PL.shape) < 0.5, mothers_PL, fathers_PL)
        moves_PL = rng.choice((-1, 1), size=genes_PL.shape)
        moves_PL[rng.random(genes_PL.shape) >= mutation_rate] = 0
        genes_PL = _project(np.clip(genes_PL + moves_PL, 1, k_max), k_max, budget, rng)
        genes_PL[0] = elite
        fitness_P = table[layers, genes_PL - 1].sum(axis=1)

    best = fitness_P.argmin()
    allocation = tuple(genes_PL[best].tolist())
    assert sum(allocation) == budget, "the projection missed the budget"
    return allocation, float(fitness_P[best])


def _tournament_winners(
    fitness_P: NDArray[np.float64], tournament: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """For each place in the next generation, the fittest of `tournament` random individuals."""
    num = len(fitness_P)
    entrants = rng.integers(num, size=(num, tournament))
    winners: NDArray[np.int64] = entrants[np.arange(num), fitness_P[entrants].argmin(axis=1)]
    return winners


def _project(
    genes_PL: NDArray[np.int64], k_max: NDArray[np.int64], budget: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Move random layers by one, within 1..k_max, until every row sums to the budget.

    All moves of a row are drawn at once: a layer with room for m moves holds m tickets, every
    ticket gets a random number, and the |budget - sum| lowest are drawn.
    """
    gap_P = budget - genes_PL.sum(axis=1)
    room_PL = np.where(gap_P[:, None] > 0, k_max - genes_PL, genes_PL - 1)
    # M: the most moves any layer can make.
    tickets_PLM = rng.random((*genes_PL.shape, int(k_max.max()) - 1))
    tickets_PLM[np.arange(tickets_PLM.shape[2]) >= room_PL[:, :, None]] = np.inf
    rank_PLM = tickets_PLM.reshape(len(genes_PL), -1).argsort(axis=1).argsort(axis=1)
    drawn_PLM = (rank_PLM < np.abs(gap_P)[:, None]).reshape(tickets_PLM.shape)
    moves_PL: NDArray[np.int64] = np.sign(gap_P)[:, None] * drawn_PLM.sum(axis=2)
    return genes_PL + moves_PL
