"""Finds the fastest block sizes for a shape by timing them on the device."""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from allocmoe.kernels.blocks import Blocks, Tile
from allocmoe.kernels.fused import launch
from allocmoe.kernels.layout import Layout, Weights

# shared memory of one program, in bytes, on every device the kernel runs on, and on Hopper
_SHARED = 99 * 1024
_SHARED_HOPPER = 227 * 1024


@dataclass(frozen=True)
class Problem:
    """A layer of experts, and the columns of its routing."""

    num_experts: int
    hidden_size: int
    inner_size: int
    num_columns: int
    dtype: torch.dtype
    layout: Layout

    def weights(self, device: torch.device, num_experts: int | None = None) -> Weights:
        """Random ones."""
        E = num_experts or self.num_experts
        outer = self.inner_size * (1 + self.layout.activation.gated)
        shapes = [(E, outer, self.hidden_size), (E, self.hidden_size, self.inner_size)]
        if self.layout.transposed:
            shapes = [(e, k, n) for e, n, k in shapes]
        up, down = (torch.empty(s, dtype=self.dtype, device=device).normal_() for s in shapes)
        return Weights(up, down, None, None)

    def routing(self, num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.randn(num_tokens, self.hidden_size, device=device).to(self.dtype)
        scores = torch.rand(num_tokens, self.num_experts, device=device)
        return hidden, scores.topk(self.num_columns, dim=1).indices

    def candidates(self, num_tokens: int, hopper: bool, up: bool) -> Iterator[Blocks]:
        """Blocks worth trying for one of the products; its tile stands in both places."""
        rows = num_tokens * self.num_columns / self.num_experts
        factor = 1 + (up and self.layout.activation.gated)
        for block_m in _block_ms(rows, num_tokens):
            # (outputs), (inputs), (blocks together), (warps), (stages)
            grid: tuple[tuple[int, ...], ...] = ((64, 128, 256), (64,), (8,), (4, 8), (3, 4))
            if block_m == 16:
                grid = ((32, 64, 128), (128, 256), (1,), (2, 4), (3, 4))
            elif rows <= 64:
                grid = ((64, 128), (64, 128), (1,), (4, 8), (3, 4))
            for (n, k, group, warps, stages), tma in itertools.product(
                itertools.product(*grid), (False, True)
            ):
                tile = Tile(n, k, group, warps, stages, tma)
                if (hopper or not tile.tma) and _fits(block_m, tile, factor, hopper):
                    yield Blocks(block_m, tile, tile)


def _block_ms(rows_per_expert: float, num_tokens: int) -> list[int]:
    low, high = min(64, rows_per_expert / 2), 2 * rows_per_expert + 16
    sizes = [m for m in (16, 32, 64, 128) if low <= m <= high]
    return [16] if num_tokens <= 16 else sizes


def _fits(block_m: int, tile: Tile, factor: int, hopper: bool) -> bool:
    """Whether registers and shared memory hold the tile, and it is large enough to be worth it."""
    shared = tile.shared_bytes(block_m, factor)
    accumulators = block_m * tile.block_n * factor // (32 * tile.num_warps)
    enough = accumulators >= 2 and shared >= 24 * 1024
    return enough and shared <= (_SHARED_HOPPER if hopper else _SHARED) and accumulators <= 128


class NothingRan(RuntimeError):
    """The device or its driver is at fault, not the tiles."""


def tune(
    problem: Problem,
    weights: Weights,
    num_tokens: int,
    timer: Callable[[Callable[[], object]], float],
    tried: Callable[[], object] = lambda: None,
) -> Blocks:
    """The fastest blocks for so many tokens: each product's best tile, then the best `block_m`."""
    device = weights.up.device
    hidden, index = problem.routing(num_tokens, device)
    best: dict[tuple[int, bool], tuple[float, Tile]] = {}
    for up in (True, False):
        for blocks in problem.candidates(num_tokens, is_hopper(device), up):
            run = launch.product(hidden, index, weights, problem.layout, blocks, up)
            try:
                took = timer(run)
            except Exception:  # a tile that this device or compiler cannot do is none to choose
                took = float("inf")
            key = (blocks.block_m, up)
            if key not in best or took < best[key][0]:
                best[key] = (took, blocks.up)
            tried()
    block_m = min({m for m, _ in best}, key=lambda m: best[m, True][0] + best[m, False][0])
    if math.isinf(best[block_m, True][0] + best[block_m, False][0]):
        raise NothingRan(f"none of the tiles ran for {num_tokens} tokens")
    return Blocks(block_m, best[block_m, True][1], best[block_m, False][1])


def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def compile_all(
    problem: Problem, tokens: Sequence[int], device: torch.device, workers: int
) -> Iterator[int]:
    """Fill Triton's cache on disk from several processes; yields how many kernels are done."""
    shares = [(problem, tuple(tokens), str(device), n, 8 * workers) for n in range(8 * workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(_compile_share, shares)


def _compile_share(share: tuple[Problem, tuple[int, ...], str, int, int]) -> int:
    problem, tokens, name, first, step = share
    device = torch.device(name)
    torch.cuda.set_device(device)
    # the sizes of the experts make the kernel, not their number
    weights = problem.weights(device, num_experts=1)
    own = tasks(problem, tokens, device)[first::step]
    for num_tokens, blocks, up in own:
        hidden, index = problem.routing(min(num_tokens, 64), device)
        try:
            launch.product(hidden, index, weights, problem.layout, blocks, up)()
            torch.cuda.synchronize()
        except Exception:  # as in `tune`
            continue
    return len(own)


def tasks(
    problem: Problem, tokens: Sequence[int], device: torch.device
) -> list[tuple[int, Blocks, bool]]:
    """Every kernel once: few tokens make another one than many."""
    found = {
        (blocks, up, num_tokens <= 16 and num_tokens): (num_tokens, blocks, up)
        for num_tokens in tokens
        for up in (True, False)
        for blocks in problem.candidates(num_tokens, is_hopper(device), up)
    }
    return list(found.values())
