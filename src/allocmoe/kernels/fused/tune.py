"""Finds the fastest block sizes for a shape by timing them on the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from allocmoe.kernels.blocks import Blocks, Tile
from allocmoe.kernels.fused import launch
from allocmoe.kernels.layout import Layout, Weights

# shared memory of one program, in bytes, that every device the kernel runs on has
_SHARED = 99 * 1024
_SHARED_HOPPER = 227 * 1024


def candidates(
    rows_per_expert: float, num_tokens: int, gated: bool, hopper: bool
) -> Iterator[Blocks]:
    """Blocks worth trying where an expert gets so many pairs; both products have the same tile."""
    for block_m in _block_ms(rows_per_expert, num_tokens):
        if block_m == 16:
            grid = itertools.product((16, 32, 64, 128), (64, 128, 256), (1,), (2, 4, 8), (3, 4, 5))
        elif block_m <= 64:
            grid = itertools.product((32, 64, 128, 256), (64, 128), (1, 8), (4, 8), (3, 4))
        else:
            grid = itertools.product((64, 128, 256), (64,), (8,), (4, 8), (3, 4))
        for (n, k, group, warps, stages), tma in itertools.product(grid, (False, True)):
            tile = Tile(n, k, group, warps, stages, tma)
            if (not tma or hopper) and _fits(block_m, tile, 1 + gated, hopper):
                yield Blocks(block_m, tile, tile)


def _block_ms(rows_per_expert: float, num_tokens: int) -> list[int]:
    low, high = min(64, rows_per_expert / 4), 2 * rows_per_expert + 16
    sizes = [m for m in (16, 32, 64, 128) if low <= m <= high]
    return [16] if num_tokens <= 16 else sizes or [128]


def _fits(block_m: int, tile: Tile, factor: int, hopper: bool) -> bool:
    """Whether registers and shared memory hold the tile, and it is large enough to be worth it."""
    shared = tile.shared_bytes(block_m, factor)
    accumulators = block_m * tile.block_n * factor // (32 * tile.num_warps)
    enough = accumulators >= 2 and shared >= 24 * 1024
    return enough and shared <= (_SHARED_HOPPER if hopper else _SHARED) and accumulators <= 128


def time_product(
    hidden_TH: torch.Tensor,
    index_TK: torch.Tensor,
    weights: Weights,
    layout: Layout,
    blocks: Blocks,
    up: bool,
    timer: Callable[[Callable[[], object]], float],
) -> float:
    """The time of one of the two products, as `timer` measures it; inf where it cannot run."""
    run = launch.product(hidden_TH, index_TK, weights, layout, blocks, up)
    try:
        return timer(run)
    except Exception:  # a tile that this device or compiler cannot do is none to choose
        return float("inf")


def tune(
    hidden_TH: torch.Tensor,
    index_TK: torch.Tensor,
    weights: Weights,
    layout: Layout,
    timer: Callable[[Callable[[], object]], float],
    tried: Callable[[], None] = lambda: None,
) -> Blocks:
    """The fastest blocks for this routing: each product's best tile, then the best `block_m`."""
    T, K = index_TK.shape
    hopper = torch.cuda.get_device_capability(hidden_TH.device) >= (9, 0)
    best: dict[tuple[int, bool], tuple[float, Tile]] = {}
    rows = T * K / weights.up.shape[0]
    for up in (True, False):
        for blocks in candidates(rows, T, up and layout.activation.gated, hopper):
            took = time_product(hidden_TH, index_TK, weights, layout, blocks, up, timer)
            key = (blocks.block_m, up)
            if key not in best or took < best[key][0]:
                best[key] = (took, blocks.up)
            tried()
    block_m = min({m for m, _ in best}, key=lambda m: best[m, True][0] + best[m, False][0])
    return Blocks(block_m, best[block_m, True][1], best[block_m, False][1])


def use_tile(blocks: Blocks, tile: Tile, up: bool) -> Blocks:
    return replace(blocks, up=tile) if up else replace(blocks, down=tile)
