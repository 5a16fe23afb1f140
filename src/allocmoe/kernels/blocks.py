"""The block sizes of the fused kernel, by the shape of the work."""

from __future__ import annotations

from dataclasses import astuple, dataclass


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


def default_blocks(num_tokens: int, num_pairs: int, num_experts: int) -> Blocks:
    """A sensible choice where nothing was tuned: by the tokens an expert can expect."""
    rows = num_pairs / num_experts
    if num_tokens <= 16 or rows <= 8:
        return Blocks(16, Tile(32, 128, 1, 4, 4, False), Tile(64, 128, 1, 4, 4, False))
    if rows <= 40:
        return Blocks(32, Tile(64, 128, 1, 4, 3, False), Tile(128, 64, 1, 4, 4, False))
    if rows <= 96:
        return Blocks(64, Tile(64, 64, 4, 4, 4, False), Tile(128, 64, 4, 4, 4, False))
    return Blocks(128, Tile(128, 64, 8, 8, 4, True), Tile(256, 64, 8, 8, 4, True))
