"""The block sizes of the fused kernel, by the shape of the work."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

import torch


@dataclass(frozen=True)
class Tile:
    """One product's block: `block_n` outputs of `block_m` pairs, `block_k` inputs at a time.

    `group_m` blocks of pairs go over the outputs together; `tma` brings the weights by the bulk
    copy engine of compute capability 9 and newer, where their layout allows it.
    """

    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    tma: bool

    def shared_bytes(self, block_m: int, factor: int) -> int:
        """What the stages take; `factor` is 2 where gate and up are computed together."""
        return self.num_stages * 2 * self.block_k * (block_m + factor * self.block_n)


@dataclass(frozen=True)
class Blocks:
    """`block_m` pairs of one expert make a block, in both products."""

    block_m: int
    up: Tile
    down: Tile

    def numbers(self) -> list[int]:
        """The same as plain numbers, which is what an operator of torch can take."""
        return [self.block_m, *map(int, astuple(self.up)), *map(int, astuple(self.down))]

    @classmethod
    def from_numbers(cls, numbers: list[int]) -> Blocks:
        up, down = numbers[1:7], numbers[7:13]
        return cls(
            numbers[0],
            Tile(up[0], up[1], up[2], up[3], up[4], bool(up[5])),
            Tile(down[0], down[1], down[2], down[3], down[4], bool(down[5])),
        )


@dataclass(frozen=True)
class BlockTable:
    """Blocks by the pairs that an expert gets on average: the first entry that reaches so far."""

    entries: tuple[tuple[float, Blocks], ...]

    def choose(self, num_pairs: int, num_experts: int) -> Blocks:
        for reach, blocks in self.entries:
            if num_pairs <= reach * num_experts:
                return blocks
        return self.entries[-1][1]


# Found on an H200 at the experts' shape of DeepSeek-V2-Lite (2048 x 1408), by `tune`. Blocks of 32
# end where most experts would need two, and their weights would be read twice.
_DEFAULT = BlockTable(
    (
        (4.0, Blocks(16, Tile(128, 128, 1, 4, 3, True), Tile(128, 128, 1, 4, 4, True))),
        (32.0, Blocks(32, Tile(64, 128, 1, 4, 3, True), Tile(128, 128, 1, 4, 3, True))),
        (math.inf, Blocks(128, Tile(128, 64, 8, 8, 4, True), Tile(256, 64, 8, 8, 4, True))),
    )
)


def default_blocks(device: torch.device) -> BlockTable:
    """What to take where nothing was tuned, cut down to the shared memory the device has."""
    shared = 0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        shared = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
    return BlockTable(tuple((reach, _fit(blocks, shared)) for reach, blocks in _DEFAULT.entries))


def _fit(blocks: Blocks, shared: int) -> Blocks:
    def fit(tile: Tile, factor: int) -> Tile:
        while shared and tile.shared_bytes(blocks.block_m, factor) > shared:
            if tile.num_stages > 2:
                tile = replace(tile, num_stages=tile.num_stages - 1)
            else:
                tile = replace(tile, block_n=tile.block_n // 2)
        return tile

    return Blocks(blocks.block_m, fit(blocks.up, 2), fit(blocks.down, 1))
