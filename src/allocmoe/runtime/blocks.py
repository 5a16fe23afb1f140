"""Block sizes that `allocmoe tune` found, kept in a file of the user's."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from allocmoe.codec import decode, encode, read_json, write_json
from allocmoe.errors import AllocMoEError
from allocmoe.kernels import Layout
from allocmoe.kernels.blocks import Blocks, BlockTable, default_blocks

FORMAT = {"kind": "allocmoe.blocks", "schema_version": 1}
# names another file than the one in the user's cache folder
VARIABLE = "ALLOCMOE_BLOCKS"
_AGAIN = "delete it, and tune again"


@dataclass(frozen=True)
class Entry:
    """Blocks for up to `reach` pairs an expert on average; None reaches everywhere."""

    reach: float | None
    blocks: Blocks


@dataclass(frozen=True)
class ShapeKey:
    """What block sizes hang on."""

    device: str
    dtype: str
    num_experts: int
    hidden_size: int
    inner_size: int
    gated: bool
    interleaved: bool
    transposed: bool


@dataclass(frozen=True)
class TunedShape:
    shape: ShapeKey
    entries: tuple[Entry, ...]

    def table(self) -> BlockTable:
        return BlockTable(
            tuple((math.inf if e.reach is None else e.reach, e.blocks) for e in self.entries)
        )


@dataclass(frozen=True)
class TunedBlocks:
    """The file: one entry a shape and device."""

    shapes: tuple[TunedShape, ...] = ()

    def with_shape(self, tuned: TunedShape) -> TunedBlocks:
        others = tuple(one for one in self.shapes if one.shape != tuned.shape)
        return replace(self, shapes=(*others, tuned))

    def save(self, path: Path) -> None:
        write_json(path, {**FORMAT, **encode(self)})

    @classmethod
    def load(cls, path: Path) -> TunedBlocks:
        data = read_json(path)
        if not isinstance(data, dict) or {k: data.get(k) for k in FORMAT} != FORMAT:
            raise AllocMoEError(f"{path}: no block sizes of this version; {_AGAIN}")
        body = {key: value for key, value in data.items() if key not in FORMAT}
        tuned = decode(cls, body, str(path))
        for shape in tuned.shapes:
            if not shape.entries:
                raise AllocMoEError(f"{path}: a shape without entries; {_AGAIN}")
            for entry in shape.entries:
                _check(entry.blocks, path)
        return tuned


def _check(blocks: Blocks, path: Path) -> None:
    """Sizes that Triton can compile."""
    for tile in (blocks.up, blocks.down):
        sizes = (blocks.block_m, tile.block_n, tile.block_k)
        powers = all(size >= 16 and size.bit_count() == 1 for size in sizes)
        warps = tile.num_warps in (1, 2, 4, 8, 16)
        if not powers or not warps or tile.group_m < 1 or tile.num_stages < 1:
            raise AllocMoEError(f"{path}: blocks that no kernel has: {blocks}; {_AGAIN}")


def blocks_path() -> Path:
    """Where tuned block sizes are kept."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "allocmoe" / "blocks.json"


def shape_key(weight_down: torch.Tensor, layout: Layout) -> ShapeKey:
    """The key of an experts module by its down projection, `[E, H, I]` unless transposed."""
    E, H, inner = weight_down.shape
    if layout.transposed:
        H, inner = inner, H
    device = weight_down.device
    return ShapeKey(
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        str(weight_down.dtype).removeprefix("torch."),
        E,
        H,
        inner,
        layout.activation.gated,
        layout.interleaved,
        layout.transposed,
    )


def blocks_for(weight_down: torch.Tensor, layout: Layout) -> BlockTable:
    """What was tuned for this shape on this device, or else the defaults."""
    path = blocks_path()
    if path.is_file():
        key = shape_key(weight_down, layout)
        for tuned in _load(path, path.stat().st_mtime_ns).shapes:
            if tuned.shape == key:
                return tuned.table()
    return default_blocks(weight_down.device)


@lru_cache(maxsize=4)
def _load(path: Path, modified: int) -> TunedBlocks:
    return TunedBlocks.load(path)
