"""Triton: the kept pairs sorted by expert, and the list of blocks the products run over.

A counting sort: up to CHUNK pairs in one launch by one program, more in two launches. The places
within an expert are handed out by atomics, so the order of its pairs may differ from run to run;
`gemm` says why no bit of the result does.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _experts_of_chunk(index_ptr, chunk, num_pairs, num_experts, CHUNK: tl.constexpr):
    """Slots of the chunk and their experts; a dropped pair has the expert `num_experts`."""
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(index_ptr + i, mask=i < num_pairs, other=-1).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    return i, expert


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    index_ptr, counts_ptr, num_pairs, num_experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr
):
    """counts[chunk, e]: the pairs of expert e in a chunk."""
    chunk = tl.program_id(0)
    _, expert = _experts_of_chunk(index_ptr, chunk, num_pairs, num_experts, CHUNK)
    counts = tl.histogram(expert, EXPERTS)
    tl.store(counts_ptr + chunk * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_blocks"])
def sort_kernel(
    index_ptr,
    counts_ptr,
    cursor_ptr,
    slot_ptr,
    table_ptr,
    num_pairs,
    num_experts,
    num_chunks,
    num_blocks,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    TABLE: tl.constexpr,
):
    chunk = tl.program_id(0)
    i, expert = _experts_of_chunk(index_ptr, chunk, num_pairs, num_experts, CHUNK)
    e = tl.arange(0, EXPERTS)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    if ONE_CHUNK:
        total = tl.histogram(expert, EXPERTS)
    else:
        total = tl.zeros((EXPERTS,), dtype=tl.int32)
        for c in range(num_chunks):
            counts = tl.load(counts_ptr + c * EXPERTS + e)
            total += counts
            before += tl.where(c < chunk, counts, 0)
    total = tl.where(e < num_experts, total, 0)
    start = tl.cumsum(total, 0) - total

    cursor_ptr += chunk * EXPERTS
    tl.store(cursor_ptr + e, start + before)
    tl.debug_barrier()
    kept = expert < num_experts
    place = tl.atomic_add(cursor_ptr + expert, 1, mask=kept)
    tl.store(slot_ptr + place, i, mask=kept)

    if chunk == 0:
        blocks = tl.cdiv(total, BLOCK_M)
        end = tl.cumsum(blocks, 0)
        for first in range(0, num_blocks, TABLE):
            b = first + tl.arange(0, TABLE)
            # block b belongs to the first expert whose blocks end after it
            owner = tl.sum((end[None, :] <= b[:, None]).to(tl.int32), 1)
            mine = (e[None, :] == owner[:, None]).to(tl.int32)
            rank = b - tl.sum(mine * (end - blocks)[None, :], 1)
            row = tl.sum(mine * start[None, :], 1) + rank * BLOCK_M
            stop = tl.sum(mine * (start + total)[None, :], 1)
            write = b < num_blocks
            tl.store(table_ptr + b * 3, tl.where(owner < EXPERTS, owner, -1), mask=write)
            tl.store(table_ptr + b * 3 + 1, row, mask=write)
            tl.store(table_ptr + b * 3 + 2, stop, mask=write)
