"""Compiles the experts' products for an H100 or H200, which need not be there, and prints a line of
JSON for each: how many 2-byte loads it has, and how many bytes of a thread's numbers lie outside of
its registers. Not in Triton's interpreter, so in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from allocmoe.kernels.blocks import Blocks, default_blocks
from allocmoe.kernels.fused.gemm import linear_kernel

NUMBERS = ["num_pairs", "num_blocks", "num_columns", "size_n", "size_k", "stride_e"]
# Triton knows of these that they are multiples of 16
MULTIPLES = ["size_n", "size_k", "stride_e", "stride_n", "stride_k"]


def compile_product(
    blocks: Blocks, up: bool, transposed: bool, interleaved: bool, tma: bool
) -> dict[str, Any]:
    """Sizes that fill no last tile, as 2880 does not."""
    tile, few = blocks.up if up else blocks.down, blocks.block_m == 16
    interleaved = interleaved and up
    width = tile.block_n * (1 + interleaved)
    types = {"x_ptr": "*bf16", "w_ptr": "*bf16", "out_ptr": "*bf16", "index_ptr": "*i64"}
    types |= dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(["alpha", "limit", "shift"], "fp32")
    types["stride_k" if transposed else "stride_n"] = "i32"
    values: dict[str, Any] = {
        "stride_n" if transposed else "stride_k": 1,
        "bias_ptr": None,
        "UP": up,
        "GATED": up,
        "INTERLEAVED": interleaved,
        "TRANSPOSED": transposed,
        "CLAMPED": False,
        "ACT": "silu" if up else "none",
        "BIAS": False,
        "SORTED": not few,
        "TAILS": blocks.block_m >= 128,
        "TMA": tma,
        "EVEN_K": False,
        "EVEN_N": False,
        "PAIRS": 64 if few else 0,
        "BLOCK_M": blocks.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
    }
    if few:
        values |= {"slot_ptr": None, "table_ptr": None}
    else:
        types |= {"slot_ptr": "*i32", "table_ptr": "*i32"}
    if tma:
        box = [1, tile.block_k, width] if transposed else [width, tile.block_k]
        types["w_desc"] = f"tensordesc<bf16{box}>".replace(" ", "")
    else:
        values["w_desc"] = None
    names = linear_kernel.arg_names
    known = [n for n, t in types.items() if t.startswith("*") or n in MULTIPLES]
    source = ASTSource(
        linear_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in values.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in known},
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {
        "up": up,
        "transposed": transposed,
        "interleaved": interleaved,
        "tma": tma,
        "block_m": blocks.block_m,
        "narrow_loads": len(re.findall(r"ld\.global\S*\.b16\b", compiled.asm["ptx"])),
        "spilled": spilled_bytes(compiled.asm["cubin"]),
    }


def spilled_bytes(cubin: bytes) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(number) for number in re.findall(r"STACK:(\d+)", told))


if __name__ == "__main__":
    import torch

    for _, blocks in default_blocks(torch.device("cpu")).entries:
        for layout in product((True, False), repeat=4):
            print(json.dumps(compile_product(blocks, *layout)), flush=True)
